/**
 * Stops jobs: asks first where work would be lost.  A job that has not begun is taken out of
 * the queue after `UNDO_MS`, in which it can be undone.  No widgets here.
 */

import { ISignal, Signal } from '@lumino/signaling';

import { GpuModel } from './model';
import { GpuState } from './state';
import { IJob } from './wire';

export const UNDO_MS = 5000;

export interface IStopOptions {
  /** Stops a job at the broker; tells of a refusal itself. */
  readonly send: (job: IJob) => Promise<void>;
  /** Asks whether to stop a job that has begun, and may lose work. */
  readonly confirm: (job: IJob) => Promise<boolean>;
  /** Says that a job leaves the queue, and offers to undo that; returns what takes the offer away. */
  readonly offerUndo: (job: IJob, undo: () => void) => () => void;
}

interface IWaiting {
  readonly job: IJob;
  readonly timer: ReturnType<typeof setTimeout>;
  readonly withdraw: () => void;
}

export class Stops {
  constructor(
    gpu: GpuModel,
    private readonly _options: IStopOptions
  ) {
    gpu.changed.connect((_, state) => this._follow(state));
    // A page that goes sends what it still holds back.
    globalThis.addEventListener?.('pagehide', () => [...this._waiting.values()].forEach(({ job }) => this._leave(job)));
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Whether a stop of this job is being asked about, held back or sent. */
  isStopping(job: IJob): boolean {
    return this._busy.has(job.id);
  }

  /** Stops a job; does nothing while an earlier stop of it is under way. */
  async stop(job: IJob): Promise<void> {
    if (this._busy.has(job.id)) {
      return;
    }
    this._become(job, true);
    if (!hasBegun(job)) {
      this._holdBack(job);
    } else if (await this._options.confirm(job)) {
      await this._send(job);
    } else {
      this._become(job, false);
    }
  }

  private _holdBack(job: IJob): void {
    const undo = (): void => {
      if (this._take(job)) {
        this._become(job, false);
      }
    };
    this._waiting.set(job.id, {
      job,
      timer: setTimeout(() => this._leave(job), UNDO_MS),
      withdraw: this._options.offerUndo(job, undo)
    });
  }

  private _leave(job: IJob): void {
    if (this._take(job)) {
      void this._send(job);
    }
  }

  /** Ends the time in which a stop can be undone; false: it was over. */
  private _take(job: IJob): boolean {
    const waiting = this._waiting.get(job.id);
    if (waiting === undefined) {
      return false;
    }
    this._waiting.delete(job.id);
    clearTimeout(waiting.timer);
    waiting.withdraw();
    return true;
  }

  private async _send(job: IJob): Promise<void> {
    try {
      await this._options.send(job);
    } finally {
      this._become(job, false);
    }
  }

  /** A job that begins in the meantime is stopped at once. */
  private _follow(state: GpuState): void {
    if (state.kind === 'ready') {
      state.status.jobs.filter(hasBegun).forEach(job => this._leave(job));
    }
  }

  private _become(job: IJob, busy: boolean): void {
    if (busy) {
      this._busy.add(job.id);
    } else {
      this._busy.delete(job.id);
    }
    this._changed.emit();
  }

  private readonly _changed = new Signal<this, void>(this);
  private readonly _busy = new Set<string>();
  private readonly _waiting = new Map<string, IWaiting>();
}

function hasBegun(job: IJob): boolean {
  return job.state !== 'queued' || job.attempt > 0;
}
