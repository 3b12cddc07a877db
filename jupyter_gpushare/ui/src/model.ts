/**
 * What is known about the user's GPU, kept up to date.  Knows no widget.
 *
 * The state is one of four kinds, so that numbers beside an error cannot be
 * shown.  Figures are polled while the page is visible, one request at a time,
 * ever more rarely while nobody answers; `refresh` is called for every event of
 * the server, so that changes do not wait for the next poll.
 */

import { IDisposable } from '@lumino/disposable';
import { Poll } from '@lumino/polling';
import { ISignal, Signal } from '@lumino/signaling';

import type { LeaseVerb } from './requests';
import { Samples } from './samples';
import { IJob, ILease, IStatus, StatusAnswer } from './wire';

export type GpuState =
  | { readonly kind: 'loading' }
  /** This server knows no broker: nothing is shown anywhere. */
  | { readonly kind: 'off' }
  | { readonly kind: 'silent'; readonly since: Date }
  | { readonly kind: 'ready'; readonly status: IStatus; readonly lease: ILease | null };

/** What a lease is for a person. */
export type Phase =
  | 'starting'
  | 'active'
  | 'idle'
  | 'warned'
  | 'falling-asleep'
  | 'asleep'
  | 'waking'
  | 'ended';

/** What people are told when it happens. */
export type Notice =
  | { readonly kind: 'warned'; readonly lease: ILease }
  | { readonly kind: 'asleep'; readonly lease: ILease }
  | { readonly kind: 'waking'; readonly lease: ILease }
  /** `seconds` since it began to wake; null where that was not seen. */
  | { readonly kind: 'back'; readonly lease: ILease; readonly seconds: number | null }
  /** A warning that no longer holds. */
  | { readonly kind: 'calm' }
  | { readonly kind: 'job-ended'; readonly job: IJob }
  /** Its room was needed: it sleeps, or is back in the queue. */
  | { readonly kind: 'job-paused'; readonly job: IJob };

/** The warning comes this long before the GPU is lent, or a third of a shorter idle time-out. */
const WARNING_S = 300;

export const ENDED: ReadonlySet<string> = new Set(['succeeded', 'failed', 'cancelled']);

export function phaseOf(lease: ILease): Phase {
  switch (lease.state) {
    case 'pending':
    case 'granted':
      return 'starting';
    case 'running':
      if (lease.idle_s === null) {
        return 'active';
      }
      return isWarned(lease) ? 'warned' : 'idle';
    case 'suspending':
      return 'falling-asleep';
    case 'suspended':
      return lease.wanted ? 'waking' : 'asleep';
    case 'resuming':
      return 'waking';
    case 'stopping':
    case 'released':
    case 'failed':
      return 'ended';
  }
}

function isWarned(lease: ILease): boolean {
  if (lease.lend_in_s === null || lease.idle_s === null) {
    return false;
  }
  return lease.lend_in_s <= Math.min(WARNING_S, (lease.idle_s + lease.lend_in_s) / 3);
}

/** Returns what to tell about a lease that went from one phase to another. */
export function leaseNotice(
  before: Phase,
  lease: ILease,
  wakingSeconds: number | null
): Notice | null {
  const now = phaseOf(lease);
  if (now === before) {
    return null;
  }
  if (now === 'warned' || now === 'asleep' || now === 'waking') {
    return { kind: now, lease };
  }
  if ((before === 'waking' || before === 'asleep') && (now === 'active' || now === 'idle')) {
    return { kind: 'back', lease, seconds: wakingSeconds };
  }
  return before === 'warned' ? { kind: 'calm' } : null;
}

/** The jobs that had not ended, and how often each had been paused. */
export type Living = { readonly [id: string]: number };

/** Returns what `jobNotices` compares a later answer with. */
export function livingJobs(jobs: readonly IJob[]): Living {
  const living = jobs.filter(job => !ENDED.has(job.state));
  return Object.fromEntries(living.map(job => [job.id, job.preemptions]));
}

/** Returns what to tell of jobs that ended or were paused since. */
export function jobNotices(before: Living, now: readonly IJob[]): Notice[] {
  const notices: Notice[] = [];
  for (const job of now) {
    const pauses = before[job.id];
    if (pauses === undefined) {
      continue;
    }
    if (ENDED.has(job.state)) {
      notices.push({ kind: 'job-ended', job });
    } else if (job.preemptions > pauses) {
      notices.push({ kind: 'job-paused', job });
    }
  }
  return notices;
}

/** Returns what the page shows for an answer of the server. */
export function stateOf(answer: StatusAnswer): GpuState {
  if (!answer.enabled) {
    return { kind: 'off' };
  }
  if (answer.silent_since !== null) {
    return { kind: 'silent', since: new Date(answer.silent_since) };
  }
  const lease = answer.leases.find(lease => lease.server === answer.server) ?? null;
  return { kind: 'ready', status: answer, lease };
}

export class GpuModel implements IDisposable {
  constructor(options: GpuModel.IOptions) {
    this._options = options;
    this._now = options.now ?? (() => Date.now());
    this._poll = new Poll<void>({
      name: 'jupyter-gpushare:status',
      frequency: {
        interval: options.intervalMs ?? 5000,
        backoff: true,
        max: 300_000
      },
      standby: options.standby ?? 'when-hidden',
      linger: 0,
      factory: () => {
        const asking = this._ask();
        this._asking = asking.catch(() => undefined);
        return asking;
      }
    });
  }

  get state(): GpuState {
    return this._state;
  }

  /** Emitted when `state` was replaced. */
  get changed(): ISignal<this, GpuState> {
    return this._changed;
  }

  /** Emitted for what people are told, once for each. */
  get noticed(): ISignal<this, Notice> {
    return this._noticed;
  }

  get isDisposed(): boolean {
    return this._poll.isDisposed;
  }

  /** The jobs of the last answer that had not ended; null before the first. */
  get living(): Living | null {
    return this._last?.living ?? null;
  }

  /** Tells what became of these jobs, which an earlier page saw alive. */
  catchUp(living: Living): void {
    const state = this._state;
    if (state.kind !== 'ready') {
      this._livingBefore = living;
      return;
    }
    for (const notice of jobNotices(living, state.status.jobs)) {
      this._noticed.emit(notice);
    }
  }

  /** Since when the lease of this server is waking, in milliseconds; null: it is not. */
  get wakingSince(): number | null {
    return this._wakingSince;
  }

  /** Utilization and memory of this server's lease, ten minutes back. */
  readonly samples = new Samples();

  /** How often figures are fetched. */
  set intervalMs(value: number) {
    this._poll.frequency = { ...this._poll.frequency, interval: value };
  }

  /** Asks now (or once more, when a question is under way) and returns after the answer. */
  async refresh(): Promise<void> {
    await this._asking;
    if (this.isDisposed || this._state.kind === 'off') {
      return;
    }
    await this._poll.refresh();
    // Rejected when the poll is disposed meanwhile.
    await this._poll.tick.catch(() => undefined);
  }

  /** Wakes, keeps or lends the lease of this server; rejects with the broker's sentence. */
  async change(verb: LeaseVerb, minutes = 30): Promise<void> {
    const state = this._state;
    if (state.kind === 'ready' && state.lease !== null) {
      await this._options.changeLease(state.lease.id, verb, minutes);
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
    try {
      state = stateOf(await this._options.fetchStatus());
    } catch (error) {
      const since = this._state.kind === 'silent' ? this._state.since : new Date(this._now());
      this._become({ kind: 'silent', since });
      throw error;
    }
    this._become(state);
    if (state.kind === 'off') {
      void this._poll.stop();
    } else if (state.kind === 'silent') {
      // Rejected, so that the next question comes later.
      throw new Error('The GPU broker is silent.');
    }
  }

  private _become(state: GpuState): void {
    if (this.isDisposed) {
      return;
    }
    this._state = state;
    if (state.kind === 'ready') {
      this._measure(state.status, state.lease);
    } else {
      this.samples.clear();
    }
    this._changed.emit(state);
    if (state.kind === 'ready') {
      this._tell(state.status, state.lease);
    }
  }

  private _measure(status: IStatus, lease: ILease | null): void {
    if (lease !== null && phaseOf(lease) === 'waking') {
      this._wakingSince = this._wakingSince ?? this._now();
    }
    if (lease === null || !status.devices_known) {
      this.samples.clear();
      return;
    }
    this.samples.add({
      at: this._now(),
      memoryBytes: lease.memory_saved_bytes > 0 ? 0 : lease.memory_used_bytes,
      utilizationPercent: lease.utilization_percent
    });
  }

  /** Compares with the last answer, also with one from before a silence. */
  private _tell(status: IStatus, lease: ILease | null): void {
    const last = this._last;
    const phase = lease === null ? null : phaseOf(lease);
    if (last !== null && last.lease === lease?.id && last.phase !== null) {
      const seconds =
        this._wakingSince === null ? null : (this._now() - this._wakingSince) / 1000;
      const notice = leaseNotice(last.phase, lease, seconds);
      if (notice !== null) {
        this._noticed.emit(notice);
      }
    } else if (last !== null && last.phase === 'warned') {
      this._noticed.emit({ kind: 'calm' });
    }
    if (phase !== 'waking') {
      this._wakingSince = null;
    }
    const living = last?.living ?? this._livingBefore;
    for (const notice of living === null ? [] : jobNotices(living, status.jobs)) {
      this._noticed.emit(notice);
    }
    this._last = { living: livingJobs(status.jobs), lease: lease?.id ?? null, phase };
  }

  private readonly _options: GpuModel.IOptions;
  private readonly _now: () => number;
  private readonly _poll: Poll<void>;
  private readonly _changed = new Signal<this, GpuState>(this);
  private readonly _noticed = new Signal<this, Notice>(this);
  private _state: GpuState = { kind: 'loading' };
  private _asking: Promise<void> = Promise.resolve();
  private _livingBefore: Living | null = null;
  private _last: { living: Living; lease: string | null; phase: Phase | null } | null = null;
  private _wakingSince: number | null = null;
}

export namespace GpuModel {
  export interface IOptions {
    readonly fetchStatus: () => Promise<StatusAnswer>;
    readonly changeLease: (lease: string, verb: LeaseVerb, minutes: number) => Promise<unknown>;
    readonly intervalMs?: number;
    readonly standby?: Poll.Standby;
    /** Milliseconds; tests bring their own clock. */
    readonly now?: () => number;
  }
}
