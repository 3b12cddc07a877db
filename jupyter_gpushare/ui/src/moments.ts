/** Words for the events in a job's timeline. */

import type { TranslationBundle } from '@jupyterlab/translation';

/** Returns the word for one event in a job's timeline. */
export function momentText(trans: TranslationBundle, what: string): string {
  switch (what) {
    case 'submitted':
      return trans.__('Submitted');
    case 'grant':
      return trans.__('Starting');
    case 'started':
      return trans.__('Started');
    case 'progress':
      return trans.__('Progress');
    case 'suspend':
      return trans.__('Paused');
    case 'resume':
      return trans.__('Resumed');
    case 'requeue':
      return trans.__('Back in queue');
    case 'edit':
      return trans.__('Changed');
    case 'move':
      return trans.__('Moved');
    case 'ended':
      return trans.__('Ended');
    case 'admin':
      return trans.__('Administrator');
    case 'device':
    case 'low-use':
    case 'watchdog':
      return trans.__('GPU');
    case 'lost':
      return trans.__('GPU state lost');
    case 'time_limit':
      return trans.__('Time limit');
    default:
      return trans.__('Note');
  }
}
