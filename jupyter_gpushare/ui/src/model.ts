/**
 * What is known about the user's GPU, kept up to date.  Knows no widget.
 *
 * The state is one of four kinds, so that numbers beside an error cannot be
 * shown.  Figures are polled while the page is visible, one request at a time,
 * ever more rarely while nobody answers; `refresh` is called for every event of
 * the server, so that changes do not wait for the next poll.
 */

import { IDisposable } from '@lumino/disposable';
import { IPoll, Poll } from '@lumino/polling';
import { ISignal, Signal } from '@lumino/signaling';

import type { LeaseVerb } from './requests';
import { Samples } from './samples';
import { IJob, ILease, IStatus, StatusAnswer } from './wire';

export type GpuState =
  | { readonly kind: 'loading' }
  /** This server knows no broker: nothing is shown anywhere. */
  | { readonly kind: 'off' }
  /** Who does not answer: the broker, or this server itself. */
  | { readonly kind: 'silent'; readonly since: Date; readonly who: 'broker' | 'server' }
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
  /** The driver could not bring its memory back. */
  | 'lost'
  | 'ended';

/** What people are told when it happens. */
export type Notice =
  | { readonly kind: 'warned'; readonly lease: ILease }
  | { readonly kind: 'asleep'; readonly lease: ILease }
  | { readonly kind: 'waking'; readonly lease: ILease }
  /** `seconds` since it began to wake; null where that was not seen. */
  | { readonly kind: 'back'; readonly lease: ILease; readonly seconds: number | null }
  /** Its memory could not be brought back. */
  | { readonly kind: 'lost'; readonly lease: ILease }
  /** A warning, or a loss, that no longer holds. */
  | { readonly kind: 'calm' }
  | { readonly kind: 'job-ended'; readonly job: IJob }
  /** Its room was needed: it sleeps, or is back in the queue; `again`: it began once more since. */
  | { readonly kind: 'job-paused'; readonly job: IJob; readonly again: boolean }
  /** More at once than anybody wants to be told one by one. */
  | { readonly kind: 'jobs'; readonly ended: readonly IJob[]; readonly paused: readonly IJob[] };

/** Between two questions while nobody answers, at most. */
const MOST_MS = 300_000;

/** For an answer: this server waits 10 s for the broker's, and says then that it is silent. */
const PATIENCE_MS = 30_000;

/** The warning comes this long before the GPU is lent, or a third of a shorter idle time-out. */
const WARNING_S = 300;

export const ENDED: ReadonlySet<string> = new Set(['succeeded', 'failed', 'cancelled']);

export function phaseOf(lease: ILease): Phase {
  switch (lease.state) {
    case 'pending':
    case 'granted':
      return 'starting';
    case 'running':
      if (lease.lost) {
        return 'lost';
      }
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
  if (now === 'warned' || now === 'asleep' || now === 'waking' || now === 'lost') {
    return { kind: now, lease };
  }
  if ((before === 'waking' || before === 'asleep') && (now === 'active' || now === 'idle')) {
    return { kind: 'back', lease, seconds: wakingSeconds };
  }
  return before === 'warned' || before === 'lost' ? { kind: 'calm' } : null;
}

/** What an answer said of jobs, as far as a later one is compared with it. */
export interface ISeenJobs {
  /** How often each job that had not ended had been paused, and had begun. */
  readonly living: { readonly [id: string]: Pick<IJob, 'preemptions' | 'attempt'> };
  /** When the newest was submitted; empty: there was none. */
  readonly newest: string;
  /** When the last one ended; empty: none had; missing in what earlier versions kept. */
  readonly lastEnd?: string;
}

const UNSEEN = { preemptions: 0, attempt: 0 };

/** So many are told one by one. */
const MOST_NOTICES = 3;

/** Returns what `jobNotices` compares a later answer with; the same as long as nothing happens. */
export function seenJobs(jobs: readonly IJob[]): ISeenJobs {
  const latest = (moments: readonly string[]): string => moments.reduce((a, b) => (b > a ? b : a), '');
  const living = jobs.filter(job => !ENDED.has(job.state));
  return {
    living: Object.fromEntries(living.map(({ id, preemptions, attempt }) => [id, { preemptions, attempt }])),
    newest: latest(jobs.map(job => job.submitted_at)),
    lastEnd: latest(jobs.map(job => job.ended_at ?? ''))
  };
}

/**
 * Returns what to tell of jobs that ended or were paused since, also of those that began
 * since, or that the answer before had no room for.
 */
export function jobNotices(before: ISeenJobs, now: readonly IJob[]): Notice[] {
  const isNews = (job: IJob): boolean =>
    job.submitted_at > before.newest ||
    (before.lastEnd !== undefined && job.ended_at !== null && job.ended_at > before.lastEnd);
  const ended: IJob[] = [];
  const paused: Extract<Notice, { kind: 'job-paused' }>[] = [];
  for (const job of now) {
    const seen = before.living[job.id] ?? (isNews(job) ? UNSEEN : null);
    if (seen === null || !job.notify) {
      continue;
    }
    if (ENDED.has(job.state)) {
      ended.push(job);
    } else if (job.preemptions > seen.preemptions) {
      paused.push({ kind: 'job-paused', job, again: job.attempt > Math.max(1, seen.attempt) });
    }
  }
  if (ended.length + paused.length > MOST_NOTICES) {
    return [{ kind: 'jobs', ended, paused: paused.map(notice => notice.job) }];
  }
  return [...ended.map(job => ({ kind: 'job-ended', job }) as const), ...paused];
}

/** Returns what the page shows for an answer of the server. */
export function stateOf(answer: StatusAnswer): GpuState {
  if (!answer.enabled) {
    return { kind: 'off' };
  }
  if (answer.silent_since !== null) {
    return { kind: 'silent', since: new Date(answer.silent_since), who: 'broker' };
  }
  const lease = answer.leases.find(lease => lease.server === answer.server) ?? null;
  return { kind: 'ready', status: answer, lease };
}

export class GpuModel implements IDisposable {
  constructor(options: GpuModel.IOptions) {
    this._options = options;
    this._now = options.now ?? (() => Date.now());
    this._intervalMs = options.intervalMs ?? 5000;
    this._poll = new Poll<void>({
      name: 'jupyter-gpushare:status',
      frequency: this._pace(this._intervalMs),
      standby: options.standby ?? 'when-hidden',
      linger: 0,
      factory: () => (this._asking = this._ask())
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

  /** Tells what became of jobs since an earlier page saw them. */
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

  /** When the lease of this server began to wake, in milliseconds; null: it does not, or was not seen to begin. */
  get wakingSince(): number | null {
    return this._wakingSince;
  }

  /** Utilization and memory of this server's lease, ten minutes back. */
  readonly samples = new Samples();

  /** How often figures are fetched. */
  set intervalMs(value: number) {
    this._intervalMs = value;
    if (this._state.kind !== 'silent') {
      this._poll.frequency = this._pace(value);
    }
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

  /** Asks now, after a time in which nobody looked. */
  lookBack(): Promise<void> {
    this._away = true;
    return this.refresh();
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
    const asking = new AbortController();
    const patience = setTimeout(() => asking.abort(), PATIENCE_MS);
    try {
      state = stateOf(await this._options.fetchStatus(asking.signal));
    } catch {
      const before = this._state;
      const since = before.kind === 'silent' && before.who === 'server' ? before.since : new Date(this._now());
      state = { kind: 'silent', since, who: 'server' };
    } finally {
      clearTimeout(patience);
    }
    if (this.isDisposed) {
      return;
    }
    const { interval } = this._poll.frequency;
    this._poll.frequency = this._pace(state.kind === 'silent' ? 2 * interval : this._intervalMs);
    this._become(state);
    if (state.kind === 'off') {
      void this._poll.stop();
    }
  }

  /** The poll's own back-off draws its pauses by chance, and so does not stay at the longest. */
  private _pace(interval_ms: number): IPoll.Frequency {
    const max = Math.max(MOST_MS, this._intervalMs);
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
      this._tell(state.status, state.lease);
    }
  }

  private _measure(status: IStatus, lease: ILease | null): void {
    if (lease !== null && phaseOf(lease) === 'waking' && this._last?.lease === lease.id) {
      const began = this._last.phase !== 'waking' && !this._away;
      this._wakingSince = this._wakingSince ?? (began ? this._now() : null);
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
      const notice = leaseNotice(last.phase, lease, this._wokeIn(status, lease));
      if (notice !== null) {
        this._noticed.emit(notice);
      }
    } else if (last !== null && (last.phase === 'warned' || last.phase === 'lost')) {
      this._noticed.emit({ kind: 'calm' });
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

  /** Seconds that it took to wake, also where it was awake long before this page looked again. */
  private _wokeIn(status: IStatus, lease: ILease): number | null {
    if (this._wakingSince === null) {
      return null;
    }
    const awake_ms = Math.max(0, Date.parse(status.at) - Date.parse(lease.since_at));
    return (this._now() - this._wakingSince - awake_ms) / 1000;
  }

  private readonly _options: GpuModel.IOptions;
  private readonly _now: () => number;
  private readonly _poll: Poll<void>;
  private readonly _changed = new Signal<this, GpuState>(this);
  private readonly _noticed = new Signal<this, Notice>(this);
  private _state: GpuState = { kind: 'loading' };
  private _intervalMs: number;
  private _asking: Promise<void> = Promise.resolve();
  private _seenBefore: ISeenJobs | null = null;
  private _last: { jobs: ISeenJobs; lease: string | null; phase: Phase | null } | null = null;
  private _wakingSince: number | null = null;
  /** Whether nothing is known of the time since the last answer. */
  private _away = false;
}

export namespace GpuModel {
  export interface IOptions {
    readonly fetchStatus: (signal: AbortSignal) => Promise<StatusAnswer>;
    readonly changeLease: (lease: string, verb: LeaseVerb, minutes: number) => Promise<unknown>;
    readonly intervalMs?: number;
    readonly standby?: Poll.Standby;
    /** Milliseconds; tests bring their own clock. */
    readonly now?: () => number;
  }
}
