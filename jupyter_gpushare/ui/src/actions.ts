/** The actions on a lease, shared by panel, banner and notifications. */

import { Notification } from '@jupyterlab/apputils';

import { attempt } from './attempt';
import { keptText } from './messages';
import { phaseOf } from './state';
import type { LeaseVerb } from './requests';
import type { IGpuModel } from './tokens';
import { ILeaseStatus } from './wire';
import { trans } from './translate';

export interface Action {
  readonly verb: LeaseVerb;
  readonly label: string;
  readonly caption: string;
  /** Whether this is the action that most people want now. */
  readonly accent: boolean;
  /** Runs the action; a notification shows a refusal. */
  readonly run: () => Promise<void>;
}

export class Actions {
  constructor(private readonly _gpu: Pick<IGpuModel, 'model' | 'options'>) {}

  /** Returns the actions that make sense in the lease's current phase. */
  of(lease: ILeaseStatus): Action[] {
    switch (phaseOf(lease)) {
      case 'warned':
        return [this.keep(), this.lend()];
      case 'idle':
      case 'active':
        return lease.suspendable ? [this.keep(false), this.lend()] : [];
      case 'asleep':
        return [this.wake()];
      case 'waking':
        return lease.state === 'suspended' ? [this.stayAsleep()] : [];
      case 'starting':
      case 'falling-asleep':
      case 'lost':
      case 'ended':
        return [];
    }
  }

  wake(): Action {
    const caption = trans.__('Get the GPU back now, before a cell needs it');
    return this._action('resume', trans.__('Wake now'), caption, true);
  }

  stayAsleep(): Action {
    const caption = trans.__('Leave the GPU to others; a waiting cell goes on when you wake it');
    return this._action('stay-asleep', trans.__('Stay asleep'), caption);
  }

  keep(accent = true): Action {
    const minutes = this._minutes();
    const label = trans.__('Keep it %1 min', minutes);
    return this._action('keep', label, this._keepCaption(minutes), accent, () => this._receipt());
  }

  lend(): Action {
    const caption = trans.__('Let waiting jobs use the GPU; your variables stay');
    return this._action('lend', trans.__('Lend it now'), caption);
  }

  private _action(verb: LeaseVerb, label: string, caption: string, accent = false, then?: () => void): Action {
    const run = async (): Promise<void> => {
      if (await this._do(verb)) {
        then?.();
      }
    };
    return { verb, label, caption, accent, run };
  }

  /** Returns the chosen minutes, limited to those left today. */
  private _minutes(): number {
    const left = Math.floor(this._left() ?? Infinity);
    const chosen = this._gpu.options().keepMinutes;
    return left < 1 ? chosen : Math.min(left, chosen);
  }

  private _left(): number | null {
    return this._gpu.model.lease?.keep_left_minutes ?? null;
  }

  private _keepCaption(minutes: number): string {
    const left = this._left();
    return left === null
      ? trans.__('Do not lend the GPU for %1 minutes, idle or not', minutes)
      : trans.__(
          'Do not lend the GPU for %1 minutes, idle or not; %2 minutes of that are left today',
          minutes,
          Math.floor(left)
        );
  }

  /** Shows until when the GPU is kept and the minutes left today, and offers to undo it. */
  private _receipt(): void {
    const until = this._gpu.model.lease?.keep_until ?? null;
    if (until === null) {
      return;
    }
    Notification.success(keptText(until, this._left()), {
      autoClose: 8000,
      actions: [
        {
          label: trans.__('Undo'),
          caption: trans.__('Do not keep it; the minutes count no more'),
          callback: () => void this._do('keep', 0)
        }
      ]
    });
  }

  /** Sends the change; returns whether it succeeded. */
  private _do(verb: LeaseVerb, minutes = this._minutes()): Promise<boolean> {
    return attempt(() => this._gpu.model.change(verb, minutes));
  }
}

/** Returns the button of a notification for an action. */
export function buttonOf(action: Action): Notification.IAction {
  return {
    label: action.label,
    caption: action.caption,
    displayType: action.accent ? 'accent' : 'default',
    callback: () => void action.run()
  };
}
