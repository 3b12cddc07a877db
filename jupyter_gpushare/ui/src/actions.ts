/** What can be done with a lease, and how; the same in panel, banner and notifications. */

import { Notification } from '@jupyterlab/apputils';
import { TranslationBundle } from '@jupyterlab/translation';

import { GpuModel } from './model';
import { phaseOf } from './state';
import type { LeaseVerb } from './requests';
import { ILeaseStatus } from './wire';

export interface Action {
  readonly verb: LeaseVerb;
  readonly label: string;
  readonly caption: string;
  /** The one that most people want now. */
  readonly accent: boolean;
  /** Does it; a refusal is shown as a notification. */
  readonly run: () => Promise<void>;
}

export class Actions {
  constructor(
    private readonly _model: GpuModel,
    private readonly _keepMinutes: () => number,
    private readonly _trans: TranslationBundle
  ) {}

  /** Returns what makes sense for a lease as it is now. */
  of(lease: ILeaseStatus): Action[] {
    switch (phaseOf(lease)) {
      case 'warned':
        return [this.keep(), this.lend()];
      case 'idle':
      case 'active':
        return lease.suspendable ? [this.keep(false), this.lend()] : [];
      case 'asleep':
        return [this.wake()];
      case 'starting':
      case 'falling-asleep':
      case 'waking':
      case 'lost':
      case 'ended':
        return [];
    }
  }

  wake(): Action {
    return {
      verb: 'resume',
      label: this._trans.__('Wake now'),
      caption: this._trans.__('Get the GPU back now, before a cell needs it'),
      accent: true,
      run: () => this._do('resume')
    };
  }

  keep(accent = true): Action {
    const minutes = this._minutes();
    return {
      verb: 'keep',
      label: this._trans.__('Keep it %1 min', minutes),
      caption: this._keepCaption(minutes),
      accent,
      run: () => this._do('keep')
    };
  }

  lend(): Action {
    return {
      verb: 'lend',
      label: this._trans.__('Lend it now'),
      caption: this._trans.__('Let waiting jobs use the GPU; your variables stay'),
      accent: false,
      run: () => this._do('lend')
    };
  }

  /** As many as were chosen, and no more than the day has left. */
  private _minutes(): number {
    const left = Math.floor(this._left() ?? Infinity);
    return left < 1 ? this._keepMinutes() : Math.min(left, this._keepMinutes());
  }

  private _left(): number | null {
    const state = this._model.state;
    return state.kind === 'ready' ? state.status.keep_left_minutes : null;
  }

  private _keepCaption(minutes: number): string {
    const left = this._left();
    return left === null
      ? this._trans.__('Do not lend the GPU for %1 minutes, idle or not', minutes)
      : this._trans.__(
          'Do not lend the GPU for %1 minutes, idle or not; %2 minutes of that are left today',
          minutes,
          Math.floor(left)
        );
  }

  private async _do(verb: LeaseVerb): Promise<void> {
    try {
      await this._model.change(verb, this._minutes());
    } catch (error) {
      Notification.error(error instanceof Error ? error.message : String(error), {
        autoClose: 8000
      });
    }
  }
}
