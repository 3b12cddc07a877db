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
  /** Empty where no Jupyter kernel is known. */
  readonly kernel_id: string;
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
  /** The driver could not bring its GPU memory back: its kernels have to restart. */
  readonly lost: boolean;
  readonly badge: string;
  readonly sentence: string;
  readonly idle_s: number | null;
  readonly lend_in_s: number | null;
  readonly utilization_percent: number | null;
  readonly since_at: string;
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
  readonly preemptions: number;
  readonly started_at: string | null;
  readonly ended_at: string | null;
  readonly command: readonly string[];
  readonly checkpoint: Checkpoint;
  readonly cwd: string | null;
  readonly variables: readonly string[];
  readonly gpus: string;
  readonly memory: string | null;
  readonly profile: string | null;
  readonly retries: number;
  readonly borrow: boolean;
  readonly priority: number;
  /** Between SIGTERM and SIGKILL; null: the site's. */
  readonly grace_s: number | null;
  readonly source: IJobSource | null;
  /** Whether its owner wants to be told when it ends or is paused. */
  readonly notify: boolean;
}

export type Checkpoint = 'suspend' | 'sigterm' | 'none';

/** Where a job came from; paths are below the root of the user's files. */
export interface IJobSource {
  readonly path: string;
  readonly kernel: string;
  readonly output: string;
  readonly arguments: string;
  readonly parameters: { readonly [name: string]: string };
}

export interface IJobList {
  readonly jobs: readonly IJob[];
}

export interface IMoment {
  readonly at: string;
  readonly what: string;
  readonly sentence: string;
}

export interface ITimeline {
  readonly moments: readonly IMoment[];
}

/** What a user took of a project on a day. */
export interface IDayUse {
  readonly day: string;
  readonly project: string;
  readonly used_gpu_s: number;
  readonly lent_gpu_s: number;
}

/** The last seven days. */
export interface IHistory {
  /** Only days with use. */
  readonly days: readonly IDayUse[];
  readonly used_gpu_s: number;
  readonly lent_gpu_s: number;
  readonly helped_jobs: number;
}

/** What would become of a job that is submitted now. */
export interface IOutlook {
  readonly starts: 'now' | 'soon' | 'no';
  readonly position: number | null;
  readonly borrowed: boolean;
  readonly sentence: string;
}

export interface IOffers {
  readonly project: string;
  readonly projects: readonly string[];
  readonly job: IOutlook | null;
}

export interface IEnvironment {
  readonly name: string;
  readonly display_name: string;
  readonly language: string;
}

/** What the dialog begins with for a file. */
export interface ILaunchForm {
  readonly path: string;
  readonly kind: 'notebook' | 'script' | 'command';
  readonly cwd: string;
  readonly kernel: string;
  readonly environments: readonly IEnvironment[];
  readonly parameters: { readonly [name: string]: string };
}

/** What the dialog says: `POST gpushare/launch`. */
export interface ILaunchRequest {
  readonly path: string;
  readonly command: string;
  readonly arguments: string;
  readonly parameters: { readonly [name: string]: string };
  readonly kernel: string;
  readonly cwd: string | null;
  readonly variables: readonly string[];
  readonly gpus: string;
  readonly memory: string | null;
  readonly profile: string | null;
  readonly project: string | null;
  readonly name: string | null;
  readonly checkpoint: Checkpoint;
  readonly borrow: boolean;
  readonly notify: boolean;
  readonly retries: number;
  readonly priority: number;
  readonly grace_s: number | null;
}

/** A piece of what a job printed. */
export interface ILogPiece {
  readonly text: string;
  /** Where the piece begins, in bytes; beyond what was asked for when bytes were left out. */
  readonly offset: number;
  /** Where to read on. */
  readonly next: number;
  /** How often the job was started, as far as its logs tell. */
  readonly attempts: number;
  /** The oldest attempt whose log is kept; 0: none. */
  readonly first: number;
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
  readonly keep_left_minutes: number | null;
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
