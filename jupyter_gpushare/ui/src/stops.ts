/**
 * Stops jobs.  If work may be lost, asks first.  A job that has not begun leaves the queue after
 * `UNDO_MS`, in which the user can undo the stop.  No widgets here.
 */

import { ISignal, Signal } from '@lumino/signaling';

import { GpuModel } from './model';
import { GpuState } from './state';
import { IJob } from './wire';

export const UNDO_MS = 5000;

export interface IStopOptions {
  /** Sends the stop of a job to the broker, and notifies about a refusal. */
  readonly send: (job: IJob) => Promise<void>;
  /** Asks whether to stop jobs, at least one of which has begun and may lose work. */
  readonly confirm: (jobs: readonly IJob[]) => Promise<boolean>;
  /** Says that jobs leave the queue and offers to undo that; returns the function that removes the offer. */
  readonly offerUndo: (jobs: readonly IJob[], undo: () => void) => () => void;
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
    // A page that closes sends the stops that it still delays.
    globalThis.addEventListener?.('pagehide', () => [...this._waiting.values()].forEach(({ job }) => this._finish(job)));
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Whether a stop of this job is being confirmed, delayed or sent. */
  isStopping(job: IJob): boolean {
    return this._busy.has(job.id);
  }

  /** Stops jobs; skips those that are already stopping. */
  async stop(...jobs: readonly IJob[]): Promise<void> {
    const fresh = jobs.filter(job => !this._busy.has(job.id));
    fresh.forEach(job => this._become(job, true));
    if (fresh.some(hasBegun) && !(await this._options.confirm(fresh))) {
      fresh.forEach(job => this._become(job, false));
      return;
    }
    this._delay(fresh.filter(job => !hasBegun(job)));
    await Promise.all(fresh.filter(hasBegun).map(job => this._send(job)));
  }

  private _delay(jobs: readonly IJob[]): void {
    if (jobs.length === 0) {
      return;
    }
    const delayed = new Set(jobs);
    const undo = (): void => {
      jobs.filter(job => this._take(job)).forEach(job => this._become(job, false));
    };
    const removeOffer = this._options.offerUndo(jobs, undo);
    for (const job of jobs) {
      const withdraw = (): void => {
        delayed.delete(job);
        if (delayed.size === 0) {
          removeOffer();
        }
      };
      this._waiting.set(job.id, { job, timer: setTimeout(() => this._finish(job), UNDO_MS), withdraw });
    }
  }

  private _finish(job: IJob): void {
    if (this._take(job)) {
      void this._send(job);
    }
  }

  /** Ends the time in which a stop can be undone; returns false if it was over. */
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
      state.status.jobs.filter(hasBegun).forEach(job => this._finish(job));
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

/** Returns whether a job may have work to lose. */
export function hasBegun(job: IJob): boolean {
  return job.state !== 'queued' || job.attempt > 0;
}
