/** Notifies at once when a kernel that waits for its GPU is interrupted or restarted. */

import { Notification } from '@jupyterlab/apputils';
import { NotebookPanel } from '@jupyterlab/notebook';

import { Actions, buttonOf } from './actions';
import { interruptedText, restartedText } from './messages';
import { GpuModel } from './model';
import { phaseOf } from './state';
import { ILeaseStatus } from './wire';

// The menu item Kernel > Interrupt (`kernelmenu:interrupt`) executes one of these commands.
const INTERRUPT: ReadonlySet<string> = new Set(['notebook:interrupt-kernel', 'console:interrupt-kernel']);
const CLOSE_MS = 10_000;

export class Interrupts {
  /** `isNeeded` returns whether another kernel than the given one is busy and may wait for the GPU. */
  constructor(
    private readonly _model: GpuModel,
    private readonly _actions: Actions,
    private readonly _isNeeded: (restarted: string) => boolean,
  ) {}

  /** Must be called with each command of JupyterLab. */
  onCommand(id: string): void {
    const lease = INTERRUPT.has(id) ? this._waiting() : null;
    if (lease !== null) {
      const actions = this._actions.of(lease).map(buttonOf);
      Notification.info(interruptedText(lease), { autoClose: CLOSE_MS, actions });
    }
  }

  /** Watches the kernel of a notebook for restarts, after which no cell waits. */
  watch({ sessionContext }: NotebookPanel): void {
    let isNotified = false; // JupyterLab signals a restart more than once, also after other states
    sessionContext.statusChanged.connect((_, status) => {
      if (status === 'restarting' && !isNotified) {
        isNotified = true;
        void this._onRestart(sessionContext.session?.kernel?.id ?? '');
      } else if (status === 'idle' || status === 'busy') {
        isNotified = false;
      }
    });
  }

  private async _onRestart(kernel: string): Promise<void> {
    const lease = this._waiting();
    if (lease === null) {
      return;
    }
    const ends = lease.state === 'suspended' && !this._isNeeded(kernel);
    Notification.info(restartedText(ends), { autoClose: CLOSE_MS });
    if (ends) {
      await this._actions.stayAsleep().run();
    }
  }

  private _waiting(): ILeaseStatus | null {
    const { lease } = this._model;
    return lease !== null && phaseOf(lease) === 'waking' ? lease : null;
  }
}
