/** State of the user's GPU from the server's answers, and the changes between two answers. */

import { IJob, ILeaseStatus, IStatus } from './wire';

/** Answer of `GET gpushare/status`; it lacks the broker's status while the broker is unreachable. */
export type StatusAnswer =
  | { readonly enabled: false }
  | {
      readonly enabled: true;
      readonly server: string;
      readonly unreachable_since: string;
      readonly message: string;
    }
  | ({
      readonly enabled: true;
      readonly server: string;
      readonly unreachable_since: null;
      /** Whether this server, without a GPU, can get one while it runs. */
      readonly may_gain: boolean;
    } & IStatus);

export type GpuState =
  | { readonly kind: 'loading' }
  /** This server has no broker, so all widgets are hidden. */
  | { readonly kind: 'off' }
  /** `source` does not answer: the broker, or the Jupyter server itself. */
  | { readonly kind: 'unreachable'; readonly since: Date; readonly source: 'broker' | 'server' }
  | {
      readonly kind: 'ready';
      readonly status: IStatus;
      readonly lease: ILeaseStatus | null;
      /** Whether the server has no GPU and can get one while it runs. */
      readonly mayGain: boolean;
    };

/** State of a lease as users see it. */
export type Phase =
  | 'starting'
  | 'active'
  | 'idle'
  | 'warned'
  | 'falling-asleep'
  | 'asleep'
  | 'waking'
  /** The driver could not restore its memory. */
  | 'lost'
  | 'ended';

/** Event that is shown as a notification. */
export type Notice =
  | { readonly kind: 'warned'; readonly lease: ILeaseStatus }
  | { readonly kind: 'asleep'; readonly lease: ILeaseStatus }
  | { readonly kind: 'waking'; readonly lease: ILeaseStatus }
  /** `seconds` since it began to wake; null if that was not seen. */
  | { readonly kind: 'back'; readonly lease: ILeaseStatus; readonly seconds: number | null }
  /** Its memory could not be restored. */
  | { readonly kind: 'lost'; readonly lease: ILeaseStatus }
  /** A warning or a loss no longer holds. */
  | { readonly kind: 'cleared' }
  | { readonly kind: 'job-ended'; readonly job: IJob }
  /** Preempted: suspended or back in the queue.  `again`: it has started again since then. */
  | { readonly kind: 'job-paused'; readonly job: IJob; readonly again: boolean }
  /** More than `MAX_NOTICES` events in one answer. */
  | { readonly kind: 'jobs'; readonly ended: readonly IJob[]; readonly paused: readonly IJob[] };

export const ENDED: ReadonlySet<string> = new Set(['succeeded', 'failed', 'cancelled', 'timed_out']);

export function phaseOf(lease: ILeaseStatus): Phase {
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
      return lease.warned ? 'warned' : 'idle';
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

/** Returns the notice for a change of phase; null if there is none. */
export function leaseNotice(
  before: Phase,
  lease: ILeaseStatus,
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
  return before === 'warned' || before === 'lost' ? { kind: 'cleared' } : null;
}

/** The part of an answer that is compared with the next one. */
export interface ISeenJobs {
  /** The numbers of pauses and starts of each job that has not ended. */
  readonly living: { readonly [id: string]: Pick<IJob, 'preemptions' | 'attempt'> };
  /** When the newest job was submitted; empty if there is none. */
  readonly newest: string;
  /** When the last job ended; empty if none has. */
  readonly lastEnd: string;
}

const UNSEEN = { preemptions: 0, attempt: 0 };

/** More events than this are shown as one notice. */
const MAX_NOTICES = 3;

/** Returns the input of `jobNotices` for the next answer; equal as long as no job changes. */
export function seenJobs(jobs: readonly IJob[]): ISeenJobs {
  const latest = (moments: readonly string[]): string => moments.reduce((a, b) => (b > a ? b : a), '');
  const living = jobs.filter(job => !ENDED.has(job.state));
  return {
    living: Object.fromEntries(living.map(({ id, preemptions, attempt }) => [id, { preemptions, attempt }])),
    newest: latest(jobs.map(job => job.submitted_at)),
    lastEnd: latest(jobs.map(job => job.ended_at ?? ''))
  };
}

/** Returns a notice for each job that ended or was paused since `before`, new jobs included. */
export function jobNotices(before: ISeenJobs, now: readonly IJob[]): Notice[] {
  const isNew = (job: IJob): boolean =>
    job.submitted_at > before.newest || (job.ended_at !== null && job.ended_at > before.lastEnd);
  const ended: IJob[] = [];
  const paused: Extract<Notice, { kind: 'job-paused' }>[] = [];
  for (const job of now) {
    const seen = before.living[job.id] ?? (isNew(job) ? UNSEEN : null);
    if (seen === null || !job.notify) {
      continue;
    }
    if (ENDED.has(job.state)) {
      ended.push(job);
    } else if (job.preemptions > seen.preemptions) {
      paused.push({ kind: 'job-paused', job, again: job.attempt > Math.max(1, seen.attempt) });
    }
  }
  if (ended.length + paused.length > MAX_NOTICES) {
    return [{ kind: 'jobs', ended, paused: paused.map(notice => notice.job) }];
  }
  return [...ended.map(job => ({ kind: 'job-ended', job }) as const), ...paused];
}

/** Returns the state for an answer of the server. */
export function stateOf(answer: StatusAnswer): GpuState {
  if (!answer.enabled) {
    return { kind: 'off' };
  }
  if (answer.unreachable_since !== null) {
    return { kind: 'unreachable', since: new Date(answer.unreachable_since), source: 'broker' };
  }
  const lease = answer.leases.find(lease => lease.server === answer.server) ?? null;
  return { kind: 'ready', status: answer, lease, mayGain: lease === null && answer.may_gain };
}
