/**
 * What the server answers: `jupyter_gpushare/wire.py`, as far as the page reads it.
 * The examples in `tests/wire/golden` are read by the tests of both sides.
 */

export type LeaseState =
  | 'pending'
  | 'granted'
  | 'running'
  | 'suspending'
  | 'suspended'
  | 'resuming'
  | 'stopping'
  | 'released'
  | 'failed';

export interface IProcess {
  readonly pid: number;
  readonly name: string;
  readonly kernel: string;
  readonly used_bytes: number;
}

export interface ILease {
  readonly id: string;
  readonly server: string;
  readonly project: string;
  readonly state: LeaseState;
  readonly size: string;
  readonly device_name: string;
  readonly memory_limit_bytes: number;
  readonly memory_used_bytes: number;
  readonly memory_saved_bytes: number;
  readonly level: string;
  readonly suspendable: boolean;
  readonly borrowed: boolean;
  readonly wanted: boolean;
  readonly badge: string;
  readonly sentence: string;
  readonly idle_s: number | null;
  readonly lend_in_s: number | null;
  readonly processes: readonly IProcess[];
}

export type JobState =
  | 'queued'
  | 'starting'
  | 'running'
  | 'suspended'
  | 'stopping'
  | 'succeeded'
  | 'failed'
  | 'cancelled';

export interface IJob {
  readonly id: string;
  readonly name: string;
  readonly state: JobState;
  readonly exit_code: number | null;
  readonly attempt: number;
  readonly reason: string;
  readonly project: string;
  readonly size: string;
  readonly position: number | null;
  readonly submitted_at: string;
  readonly waited_s: number;
  readonly ran_s: number;
  readonly done: number | null;
  readonly total: number | null;
}

export interface IProject {
  readonly name: string;
  readonly quota_milli: number;
  readonly in_use_milli: number;
  readonly borrowed_milli: number;
  readonly lent_milli: number;
  readonly waiting: number;
}

export interface IDecision {
  readonly seq: number;
  readonly at: string;
  readonly sentence: string;
}

/** The broker's answer. */
export interface IStatus {
  readonly seq: number;
  readonly at: string;
  readonly user: string;
  readonly leases: readonly ILease[];
  readonly jobs: readonly IJob[];
  readonly projects: readonly IProject[];
  readonly events: readonly IDecision[];
  readonly devices_known: boolean;
}

/** What `GET gpushare/status` adds; without the broker's answer when it is silent. */
export type StatusAnswer =
  | { readonly enabled: false }
  | {
      readonly enabled: true;
      readonly server: string;
      readonly silent_since: string;
      readonly message: string;
    }
  | ({
      readonly enabled: true;
      readonly server: string;
      readonly silent_since: null;
    } & IStatus);

/** Every refusal, of the broker or of the server. */
export interface IErrorAnswer {
  readonly status: number;
  readonly reason: string;
  readonly message: string;
}
