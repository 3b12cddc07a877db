/** Several jobs of the list at once: their check boxes, and the buttons for marked jobs. */

import { UseSignal } from '@jupyterlab/ui-components';
import React from 'react';

import { Button } from './button';
import { stopText } from './messages';
import { ENDED } from './state';
import { hasBegun, Stops } from './stops';
import { IJob } from './wire';
import { trans } from './translate';

/** A dialog names at most this many jobs. */
const MAX_NAMED = 10;

/** Returns whether a job can be stopped together with others. */
export function canBeMarked(job: IJob): boolean {
  return !ENDED.has(job.state);
}

export function Mark(props: {
  job: IJob;
  marked: boolean;
  toggle: (id: string) => void;
}): JSX.Element {
  const { job } = props;
  return (
    <input
      type="checkbox"
      // The row has the keyboard focus; Space marks it.
      tabIndex={-1}
      aria-label={trans.__('Select %1', job.name)}
      checked={props.marked}
      disabled={!canBeMarked(job)}
      onClick={event => event.stopPropagation()}
      onChange={() => props.toggle(job.id)}
    />
  );
}

export function MarkedJobs(props: {
  marked: readonly IJob[];
  stops: Stops;
}): JSX.Element {
  const { marked, stops } = props;
  return (
    <UseSignal signal={stops.changed}>
      {() => {
        const stoppable = marked.filter(job => job.state !== 'stopping' && !stops.isStopping(job));
        return (
          <>
            <span className="gpushare-actions">
              <Button
                className="jp-Button jp-mod-styled jp-mod-reject"
                off={stoppable.length === 0}
                run={() => void stops.stop(...stoppable)}
              >
                {trans.__('Stop selected')}
              </Button>
            </span>
            <span className="gpushare-muted" role="status">
              {marked.length === 0 ? '' : trans._n('%1 selected', '%1 selected', marked.length)}
            </span>
          </>
        );
      }}
    </UseSignal>
  );
}

/** Returns the text about what is lost when these jobs are stopped. */
export function lossOf(jobs: readonly IJob[]): JSX.Element | string {
  if (jobs.length === 1) {
    return stopText(jobs[0]!);
  }
  const more = jobs.length - MAX_NAMED;
  return (
    <ul className="gpushare-losses">
      {jobs.slice(0, MAX_NAMED).map(job => (
        <li key={job.id}>
          <b>{job.name}</b> {hasBegun(job) ? stopText(job) : trans.__('It has not begun: nothing is lost.')}
        </li>
      ))}
      {more > 0 && <li>{trans._n('and %1 more', 'and %1 more', more)}</li>}
    </ul>
  );
}
