/* eslint-disable */
// Written by jupyter_gpushare/ui/generate.py; do not edit.
/**
 * Messages of the broker and of the user's server, from `jupyter_gpushare/protocol/wire`.
 * Senders include every field, also those with a default.
 */

export type CheckpointMode = 'suspend' | 'sigterm' | 'none';

/** Usage of one user in one project on one day (UTC, by the end of each interval). */
export interface IDayUse {
  /** "2031-05-06" */
  readonly day: string;
  readonly project: string;
  /** held by sessions and jobs */
  readonly used_gpu_s: number;
  /** used by other leases on GPUs of suspended sessions */
  readonly lent_gpu_s: number;
  /** GiB-seconds of host memory of suspended sessions and jobs */
  readonly saved_gib_s: number;
}

/** One line of the decision log. */
export interface IDecision {
  readonly seq: number;
  readonly at: string;
  readonly lease: string;
  readonly user: string;
  readonly project: string;
  readonly action: string;
  readonly why: string;
  readonly for_lease: string | null;
  readonly sentence: string;
  /** `sentence` for translation */
  readonly sentence_texts: readonly IText[];
}

/** A kernelspec as an environment for jobs. */
export interface IEnvironment {
  readonly name: string;
  readonly display_name: string;
  readonly language: string;
}

/** Every 4xx and 5xx: `message` is for the user and says what to change. */
export interface IErrorAnswer {
  readonly status: number;
  /** stable identifier: "no_capacity", "not_found", ... */
  readonly reason: string;
  readonly message: string;
  /** `message` for translation; its key is the English template */
  readonly message_texts: readonly IText[];
}

/** Seconds until something happens: in about 80 % of the cases within this range. */
export interface IEstimate {
  readonly low_s: number;
  readonly high_s: number;
}

/** Body of `POST servers/gpu`: the running server that asks gets a GPU. */
export interface IGpuGain {
  readonly gpus: string | null;
  readonly memory: string | null;
  readonly borrow: boolean;
  /** the value of GPUSHARE_LEASE in its environment; a page leaves it to the server */
  readonly lease: string;
  readonly project: string | null;
}

/** Answer to `POST gpu` of a Jupyter server: it has a GPU. */
export interface IGpuGained {
  /** "1/2 GPU" */
  readonly size: string;
  readonly memory_limit_bytes: number;
  /** its GPU is lent just now and comes with the first GPU cell */
  readonly asleep: boolean;
  /** names of kernels that looked for a GPU before: they see it after a restart */
  readonly kernels: readonly string[];
}

/** Usage of the last seven days of a user. */
export interface IHistory {
  readonly days: readonly IDayUse[];
  readonly used_gpu_s: number;
  readonly lent_gpu_s: number;
  /** jobs that sessions of the user were suspended for */
  readonly helped_jobs: number;
  readonly saved_gib_s: number;
}

/** A job as its owner sees it. */
export interface IJob {
  readonly id: string;
  readonly name: string;
  readonly state: JobState;
  readonly exit_code: number | null;
  readonly attempt: number;
  /** a sentence */
  readonly reason: string;
  readonly user: string;
  readonly project: string;
  readonly size: string;
  readonly command: readonly string[];
  readonly checkpoint: CheckpointMode;
  readonly position: number | null;
  readonly submitted_at: string;
  readonly started_at: string | null;
  readonly ended_at: string | null;
  readonly waited_s: number;
  readonly ran_s: number;
  readonly preemptions: number;
  /** of the current attempt */
  readonly server: string | null;
  /** folder of its logs in the user's files, one per attempt */
  readonly log: string | null;
  readonly done: number | null;
  readonly total: number | null;
  readonly cwd: string | null;
  /** names of the environment variables it was given */
  readonly variables: readonly string[];
  /** as requested, like the next three */
  readonly gpus: string;
  readonly memory: string | null;
  readonly profile: string | null;
  readonly retries: number;
  readonly borrow: boolean;
  readonly source: IJobSource | null;
  /** remaining run time by its progress; None: not known */
  readonly left_s: number | null;
  /** of a waiting job; None: not known well enough */
  readonly starts_in: IEstimate | null;
  /** pauses included; None: not known well enough */
  readonly ends_in: IEstimate | null;
  readonly notify: boolean;
  readonly notify_url: string;
  readonly notify_mail: boolean;
  readonly priority: number;
  /** None: the site's */
  readonly grace_s: number | null;
  /** None: no maximum */
  readonly max_run_s: number | null;
  /** `size` for translation */
  readonly size_texts: readonly IText[];
  /** `reason` for translation */
  readonly reason_texts: readonly IText[];
}

/** Body of `PUT jobs/{id}`: given fields replace those of a job in the queue. */
export interface IJobChange {
  /** one of these three replaces the size */
  readonly gpus: string | null;
  readonly memory: string | null;
  readonly profile: string | null;
  readonly project: string | null;
  readonly priority: number | null;
  /** 0: no maximum */
  readonly max_run_s: number | null;
}

/** Answer to `GET jobs`: started, requeued, queued (the next to start first), ended. */
export interface IJobList {
  readonly jobs: readonly IJob[];
}

/** One event in the timeline of a job. */
export interface IJobMoment {
  readonly at: string;
  /** "submitted", "grant", "started", "progress", "suspend", "resume", "requeue", "ended" */
  readonly what: string;
  readonly sentence: string;
  /** `sentence` for translation */
  readonly sentence_texts: readonly IText[];
}

/** Outcome of a job that would be submitted now. */
export interface IJobOutlook {
  /** soon: other work is being preempted for it */
  readonly starts: 'now' | 'soon' | 'no';
  /** in the queue */
  readonly position: number | null;
  /** it would run over its project's quota and may be preempted */
  readonly borrowed: boolean;
  readonly sentence: string;
  /** `sentence` for translation */
  readonly sentence_texts: readonly IText[];
  /** None: now, or not known well enough */
  readonly starts_in: IEstimate | null;
}

/** Body of `PUT jobs/{id}/place`: another job of the same user, project and priority in the queue. */
export interface IJobPlace {
  readonly before: string | null;
  readonly behind: string | null;
}

/** Origin of a job, for display and for duplicates; the broker stores it unread. */
export interface IJobSource {
  /** of the notebook or script, below the root of the user's files */
  readonly path: string;
  /** name of the environment (kernelspec) */
  readonly kernel: string;
  /** the notebook that is being written, below the same root */
  readonly output: string;
  /** of a script, as they were typed */
  readonly arguments: string;
  /** of a notebook, as they were typed */
  readonly parameters: { readonly [name: string]: string };
}

/** Answer to `GET jobs/{id}/timeline`: what happened to a job, oldest first. */
export interface IJobTimeline {
  /** oldest first */
  readonly moments: readonly IJobMoment[];
}

/** Defaults of the launch dialog for a file: answer of the Jupyter server's `GET gpushare/launch`. */
export interface ILaunchForm {
  readonly path: string;
  readonly kind: 'notebook' | 'script' | 'command';
  readonly cwd: string;
  readonly kernel: string;
  readonly environments: readonly IEnvironment[];
  /** names and defaults of the notebook's cell tagged "parameters" */
  readonly parameters: { readonly [name: string]: string };
}

/** Body of the Jupyter server's `POST gpushare/launch`: the fields of the launch dialog. */
export interface ILaunchRequest {
  readonly path: string;
  /** shell words and quotes, no other syntax */
  readonly command: string;
  /** of a script, in the same syntax */
  readonly arguments: string;
  /** of a notebook */
  readonly parameters: { readonly [name: string]: string };
  /** name of the environment; "": the notebook's, or that of the server */
  readonly kernel: string;
  /** absolute; default: the folder of the file, or the root */
  readonly cwd: string | null;
  /** "NAME=VALUE", or "NAME" with the server's own value */
  readonly variables: readonly string[];
  readonly gpus: string;
  readonly memory: string | null;
  readonly profile: string | null;
  readonly project: string | null;
  readonly name: string | null;
  readonly checkpoint: CheckpointMode;
  readonly borrow: boolean;
  readonly retries: number;
  readonly priority: number;
  /** between SIGTERM and SIGKILL; None: the site's */
  readonly grace_s: number | null;
  /** None: no maximum */
  readonly max_run_s: number | null;
  readonly notify: boolean;
  readonly notify_url: string;
  readonly notify_mail: boolean;
  /** when it was first sent (ISO 8601), for the name of a notebook's output; "": now */
  readonly at: string;
}

/** A session or job with its GPU, as its owner sees it. */
export interface ILeaseStatus {
  readonly id: string;
  readonly user: string;
  readonly server: string;
  readonly project: string;
  readonly kind: Kind;
  readonly state: State;
  /** "1/2 GPU" */
  readonly size: string;
  /** per device */
  readonly fraction_milli: number;
  readonly device_count: number;
  readonly devices: readonly string[];
  readonly device_name: string;
  /** all devices */
  readonly memory_limit_bytes: number;
  readonly memory_used_bytes: number;
  readonly memory_saved_bytes: number;
  readonly utilization_percent: number | null;
  /** enforcement in force: "preload", "whole_gpu", ... */
  readonly level: string;
  readonly suspendable: boolean;
  readonly borrowed: boolean;
  readonly wanted: boolean;
  readonly badge: string;
  readonly sentence: string;
  /** None: active */
  readonly idle_s: number | null;
  /** until it may be lent; None: no waiting work, or it cannot be lent */
  readonly lend_in_s: number | null;
  /** of this state */
  readonly since_at: string;
  /** of a suspended session that is used; None: not known */
  readonly back_in: IEstimate | null;
  readonly job: string | null;
  readonly processes: readonly IProcessUse[];
  /** its GPU memory could not be restored; until the affected processes have ended */
  readonly lost: boolean;
  /** kept by its owner until then, idle or not */
  readonly keep_until: string | null;
  /** of today's budget for "Keep it" there; None: a job */
  readonly keep_left_minutes: number | null;
  /** it may become larger or smaller on its device while it runs */
  readonly resizable: boolean;
  /** the GPU may be lent in `lend_in_s`, and its owner is told now */
  readonly warned: boolean;
  /** `size` for translation */
  readonly size_texts: readonly IText[];
  /** `badge` for translation */
  readonly badge_texts: readonly IText[];
  /** `sentence` for translation */
  readonly sentence_texts: readonly IText[];
}

/** One size on the spawn page or for a job. */
export interface IOffer {
  /** "1/2 GPU" */
  readonly label: string;
  /** value of user_options["gpushare"] */
  readonly options: { readonly [name: string]: string | number };
  /** all devices together */
  readonly memory_bytes: number;
  readonly starts: 'now' | 'soon' | 'no';
  readonly guaranteed: boolean;
  /** why it cannot start or is not guaranteed: a sentence */
  readonly reason: string;
  /** "H100-80GB" */
  readonly device: string;
  /** of a size that cannot start now; None: not known well enough */
  readonly starts_in: IEstimate | null;
  /** a session can wait for it */
  readonly waits: boolean;
}

/** Answer to `GET offers`: what each size would get now. */
export interface IOffers {
  readonly project: string;
  /** the user's own */
  readonly projects: readonly string[];
  readonly offers: readonly IOffer[];
  readonly use: IProjectUse;
  readonly free_milli: number;
  readonly total_milli: number;
  readonly idle_timeout_s: number;
  /** for the size in the query */
  readonly job: IJobOutlook | null;
}

/** Device memory of one process of a lease. */
export interface IProcessUse {
  readonly pid: number;
  readonly name: string;
  /** path of its notebook, or the kernel's name */
  readonly kernel: string;
  readonly used_bytes: number;
  readonly kernel_id: string;
  /** the memory of a process that forked it and has ended */
  readonly keeps: boolean;
}

/** Usage of a project in thousandths of a GPU, and the host memory of its suspended leases. */
export interface IProjectUse {
  readonly name: string;
  readonly quota_milli: number;
  readonly weight: number;
  readonly limit_milli: number | null;
  readonly in_use_milli: number;
  readonly borrowed_milli: number;
  /** claimed by suspended sessions of this project and used by other leases */
  readonly lent_milli: number;
  readonly fair_share_milli: number;
  /** queued jobs */
  readonly waiting: number;
  /** quota set through the API instead of the configuration */
  readonly overridden: boolean;
  /** GPU memory of its suspended sessions and jobs, in host memory */
  readonly saved_bytes: number;
  /** the highest that members may give to their jobs */
  readonly priority_max: number;
}

/** Body of `PUT leases/{id}/size`: one of the two sizes, on the device of the session. */
export interface ISizeRequest {
  /** "0.5", "1/4", "1" */
  readonly gpus: string | null;
  /** "20GiB" */
  readonly memory: string | null;
  /** also a size beyond what its project is guaranteed: it may sleep then */
  readonly borrow: boolean;
}

/** Answer of `GET status`: leases, jobs, projects and events of the user. */
export interface IStatus {
  /** send as ?after= to wait for the next change */
  readonly seq: number;
  readonly at: string;
  readonly user: string;
  readonly admin: boolean;
  readonly leases: readonly ILeaseStatus[];
  /** the newest 100 */
  readonly jobs: readonly IJob[];
  readonly projects: readonly IProjectUse[];
  /** the newest 20 about the user's leases */
  readonly events: readonly IDecision[];
  /** False: the device helper does not answer */
  readonly devices_known: boolean;
  /** of the site's budget today for "Keep it" */
  readonly keep_left_minutes: number | null;
  /** sessions of the user that wait for their start */
  readonly waiting: readonly IWaitingSession[];
}

/** One sentence or phrase: a key of `messages.TEMPLATES`, and what replaces `%1`, `%2`, ... */
export interface IText {
  readonly key: string;
  readonly args: readonly (string | IText)[];
}

/** A session that waits on the spawn page for its start. */
export interface IWaitingSession {
  readonly user: string;
  readonly server: string;
  readonly project: string;
  readonly size: string;
  /** among the sessions that wait, 1 is next */
  readonly position: number;
  readonly sentence: string;
  readonly sentence_texts: readonly IText[];
  /** None: not known well enough */
  readonly starts_in: IEstimate | null;
}

export type JobState = 'queued' | 'starting' | 'running' | 'suspended' | 'stopping' | 'succeeded' | 'failed' | 'cancelled' | 'timed_out';

export type Kind = 'build' | 'train';

export type State = 'pending' | 'granted' | 'running' | 'suspending' | 'suspended' | 'resuming' | 'stopping' | 'released' | 'failed';
