/**
 * State of the user's GPU and its updates.  No widgets here.
 *
 * The state is a union of four kinds, so that an error never carries stale numbers.
 * The model polls while the page is visible, one request at a time, with back-off
 * while the broker is unreachable; every server event calls `refresh`.
 */

import { IDisposable } from '@lumino/disposable';
import { IPoll, Poll } from '@lumino/polling';
import { ISignal, Signal } from '@lumino/signaling';

import type { LeaseVerb, Requests } from './requests';
import { Samples } from './samples';
import {
  GpuState,
  ISeenJobs,
  jobNotices,
  leaseNotice,
  Notice,
  Phase,
  phaseOf,
  seenJobs,
  stateOf
} from './state';
import { ILeaseStatus, IStatus } from './wire';

/** Longest interval between two polls while the broker is unreachable. */
const MAX_INTERVAL_MS = 300_000;

/** Timeout of a poll; the server itself waits 3 s for the broker. */
const TIMEOUT_MS = 30_000;

export class GpuModel implements IDisposable {
  constructor(private readonly _requests: Pick<Requests, 'status' | 'changeLease'>) {
    this._poll = new Poll<void>({
      name: 'jupyter-gpushare:status',
      frequency: this._frequency(this._intervalMs),
      standby: 'when-hidden',
      linger: 0,
      factory: () => (this._asking = this._ask())
    });
  }

  get state(): GpuState {
    return this._state;
  }

  /** The lease of this server; null if it has none or it is unknown. */
  get lease(): ILeaseStatus | null {
    return this._state.kind === 'ready' ? this._state.lease : null;
  }

  /** Emitted when `state` was replaced. */
  get changed(): ISignal<this, GpuState> {
    return this._changed;
  }

  /** Emitted once for each notice. */
  get noticed(): ISignal<this, Notice> {
    return this._noticed;
  }

  get isDisposed(): boolean {
    return this._poll.isDisposed;
  }

  /** Emits notices for jobs that changed since an earlier page load. */
  catchUp(seen: ISeenJobs): void {
    const state = this._state;
    if (state.kind !== 'ready') {
      this._seenBefore = seen;
      return;
    }
    for (const notice of jobNotices(seen, state.status.jobs)) {
      this._noticed.emit(notice);
    }
  }

  /** When the lease began to wake, in milliseconds; null if it is not waking, or its beginning was not seen. */
  get wakingSince(): number | null {
    return this._wakingSince;
  }

  /** Utilization of this server's lease in the last ten minutes. */
  readonly samples = new Samples();

  /** Draws all widgets again, after a change of settings. */
  redraw(): void {
    this._changed.emit(this._state);
  }

  /** Interval between two polls. */
  set intervalMs(value: number) {
    this._intervalMs = value;
    if (this._state.kind !== 'unreachable') {
      this._poll.frequency = this._frequency(value);
    }
  }

  /** Polls now, after a poll in flight; resolves after the answer. */
  async refresh(): Promise<void> {
    await this._asking;
    if (this.isDisposed || this._state.kind === 'off') {
      return;
    }
    await this._poll.refresh();
    // Rejected when the poll is disposed meanwhile.
    await this._poll.tick.catch(() => undefined);
  }

  /** Polls now, after a time without polls. */
  refreshAfterAbsence(): Promise<void> {
    this._away = true;
    return this.refresh();
  }

  /** Wakes, keeps or lends the lease of this server; rejects with the broker's sentence. */
  async change(verb: LeaseVerb, minutes = 30): Promise<void> {
    if (this.lease !== null) {
      await this._requests.changeLease(this.lease.id, verb, minutes);
      await this.refresh();
    }
  }

  dispose(): void {
    if (!this.isDisposed) {
      this._poll.dispose();
      Signal.clearData(this);
    }
  }

  private async _ask(): Promise<void> {
    let state: GpuState;
    const asking = new AbortController();
    const timeout = setTimeout(() => asking.abort(), TIMEOUT_MS);
    try {
      state = stateOf(await this._requests.status(asking.signal));
    } catch {
      const before = this._state;
      const since = before.kind === 'unreachable' && before.source === 'server' ? before.since : new Date(Date.now());
      state = { kind: 'unreachable', since, source: 'server' };
    } finally {
      clearTimeout(timeout);
    }
    if (this.isDisposed) {
      return;
    }
    const { interval } = this._poll.frequency;
    this._poll.frequency = this._frequency(state.kind === 'unreachable' ? 2 * interval : this._intervalMs);
    this._become(state);
    if (state.kind === 'off') {
      void this._poll.stop();
    }
  }

  /** Lumino's back-off is random and does not stay at its maximum. */
  private _frequency(interval_ms: number): IPoll.Frequency {
    const max = Math.max(MAX_INTERVAL_MS, this._intervalMs);
    return { interval: Math.min(interval_ms, max), backoff: false, max };
  }

  private _become(state: GpuState): void {
    this._state = state;
    if (state.kind === 'ready') {
      this._measure(state.status, state.lease);
    } else {
      this._away = true;
      this.samples.clear();
    }
    this._changed.emit(state);
    if (state.kind === 'ready') {
      this._notify(state.status, state.lease);
    }
  }

  private _measure(status: IStatus, lease: ILeaseStatus | null): void {
    if (lease !== null && phaseOf(lease) === 'waking' && this._last?.lease === lease.id) {
      const began = this._last.phase !== 'waking' && !this._away;
      this._wakingSince = this._wakingSince ?? (began ? Date.now() : null);
    }
    if (lease === null || !status.devices_known) {
      this.samples.clear();
    } else {
      this.samples.add({ at: Date.now(), percent: lease.utilization_percent ?? 0 });
    }
  }

  /** Compares with the last answer, also across an outage, and emits notices. */
  private _notify(status: IStatus, lease: ILeaseStatus | null): void {
    const last = this._last;
    const phase = lease === null ? null : phaseOf(lease);
    if (last !== null && last.lease === lease?.id && last.phase !== null) {
      const notice = leaseNotice(last.phase, lease, this._wokeIn(status, lease));
      if (notice !== null) {
        this._noticed.emit(notice);
      }
    } else if (last !== null && (last.phase === 'warned' || last.phase === 'lost')) {
      this._noticed.emit({ kind: 'cleared' });
    }
    if (phase !== 'waking') {
      this._wakingSince = null;
    }
    const seen = last?.jobs ?? this._seenBefore;
    for (const notice of seen === null ? [] : jobNotices(seen, status.jobs)) {
      this._noticed.emit(notice);
    }
    this._last = { jobs: seenJobs(status.jobs), lease: lease?.id ?? null, phase };
    this._away = false;
  }

  /** Returns the seconds that the resume took, even if it ended while the page was hidden. */
  private _wokeIn(status: IStatus, lease: ILeaseStatus): number | null {
    if (this._wakingSince === null) {
      return null;
    }
    const awake_ms = Math.max(0, Date.parse(status.at) - Date.parse(lease.since_at));
    return (Date.now() - this._wakingSince - awake_ms) / 1000;
  }

  private readonly _poll: Poll<void>;
  private readonly _changed = new Signal<this, GpuState>(this);
  private readonly _noticed = new Signal<this, Notice>(this);
  private _state: GpuState = { kind: 'loading' };
  private _intervalMs = 5000;
  private _asking: Promise<void> = Promise.resolve();
  private _seenBefore: ISeenJobs | null = null;
  private _last: { jobs: ISeenJobs; lease: string | null; phase: Phase | null } | null = null;
  private _wakingSince: number | null = null;
  /** Whether polls were skipped or failed since the last answer. */
  private _away = false;
}
