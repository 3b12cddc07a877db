/**
 * Model of the job list.  Fetches all jobs when the list opens, then merges the jobs of
 * each status (unfinished jobs first, at most 100), and fetches again every `AGAIN_MS`
 * while the list holds unfinished jobs that the status leaves out.  No widgets here.
 */

import { ISignal, Signal } from '@lumino/signaling';

import { jobBadge } from './messages';
import { GpuModel } from './model';
import { ENDED, GpuState } from './state';
import { IJob } from './wire';

export type Column = 'state' | 'name' | 'size' | 'waited' | 'ran' | 'progress' | 'submitted';
export type Show = 'all' | 'living' | 'ended' | 'failed';

export interface IView {
  readonly text: string;
  readonly show: Show;
  readonly column: Column;
  readonly descending: boolean;
}

export type JobsState =
  | { readonly kind: 'loading' }
  | { readonly kind: 'refused'; readonly message: string }
  | { readonly kind: 'ready'; readonly jobs: readonly IJob[] };

/** Unfinished jobs first; waiting jobs by start order, others newest first. */
export const FIRST_VIEW: IView = { text: '', show: 'all', column: 'state', descending: false };

const FAILED: ReadonlySet<string> = new Set(['failed', 'timed_out']);
const MAX_JOBS = 2000;
/** Minimum time between two fetches for jobs that the status leaves out. */
const AGAIN_MS = 30_000;
const ORDER = ['running', 'starting', 'stopping', 'suspended', 'queued', 'failed', 'timed_out', 'succeeded', 'cancelled'];

const KEYS: { readonly [column in Column]: (job: IJob) => number | string } = {
  state: job => ORDER.indexOf(job.state),
  name: job => job.name.toLowerCase(),
  size: gpusOf,
  waited: job => job.waited_s,
  ran: job => job.ran_s,
  progress: progressOf,
  submitted: job => job.submitted_at
};

/** Returns the part of a job that is done, 0 to 1; -1 if unknown. */
function progressOf(job: IJob): number {
  return job.done === null || job.total === null || job.total <= 0 ? -1 : job.done / job.total;
}

/** Returns a job's GPUs as a number to sort by; 0 for memory or a MIG instance. */
function gpusOf(job: IJob): number {
  const [part, whole = '1'] = job.memory === null && job.profile === null ? job.gpus.split('/') : ['0'];
  return Number(part) / Number(whole);
}

/** Returns the jobs of a view in its order; equal jobs by start order, then newest first. */
export function viewOf(jobs: readonly IJob[], view: IView): IJob[] {
  const words = view.text.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = jobs.filter(job => {
    const state =
      view.show === 'all' ||
      (view.show === 'failed' ? FAILED.has(job.state) : (view.show === 'ended') === ENDED.has(job.state));
    const texts = [job.name, job.id, job.project, ...job.command, job.state, jobBadge(job)];
    const text = texts.join(' ').toLowerCase();
    return state && words.every(word => text.includes(word));
  });
  const key = KEYS[view.column];
  const sign = view.descending ? -1 : 1;
  return shown.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x !== y) {
      return x < y ? -sign : sign;
    }
    // The next to start comes first.
    const [m, n] = [a.position ?? Infinity, b.position ?? Infinity];
    if (m !== n) {
      return m - n;
    }
    return a.submitted_at < b.submitted_at ? 1 : a.submitted_at > b.submitted_at ? -1 : 0;
  });
}

/** Returns whether the owner can reorder a job: it waits and has never started. */
export function isInOrder(job: IJob): boolean {
  return job.state === 'queued' && job.attempt === 0;
}

/** Returns the owner's job before (-1) or behind (1) `job` in the queue, with its project and priority. */
export function neighbourOf(jobs: Iterable<IJob>, job: IJob, step: -1 | 1): IJob | null {
  const mine = Array.from(jobs).filter(
    other => isInOrder(other) && other.project === job.project && other.priority === job.priority
  );
  mine.sort((a, b) => (a.position ?? Infinity) - (b.position ?? Infinity));
  const at = mine.findIndex(({ id }) => id === job.id);
  return at === -1 ? null : mine[at + step] ?? null;
}

export class JobsModel {
  constructor(
    gpu: GpuModel,
    private readonly _fetch: (limit: number) => Promise<readonly IJob[]>
  ) {
    gpu.changed.connect(this._follow, this);
  }

  get state(): JobsState {
    return this._state;
  }

  get view(): IView {
    return this._view;
  }

  set view(view: IView) {
    this._view = view;
    this._changed.emit();
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  job(id: string): IJob | null {
    return this._jobs.get(id) ?? null;
  }

  neighbour(job: IJob, step: -1 | 1): IJob | null {
    return neighbourOf(this._jobs.values(), job, step);
  }

  /** Stores a job from an answer of the broker, because the next status may leave out an ended job. */
  put(job: IJob): void {
    if (this._state.kind === 'ready') {
      this._jobs.set(job.id, job);
      this._become({ kind: 'ready', jobs: [...this._jobs.values()] });
    }
  }

  /** Fetches all jobs; concurrent callers share one request. */
  refresh(): Promise<void> {
    this._fetching ??= this._refresh().finally(() => {
      this._fetching = null;
    });
    return this._fetching;
  }

  private async _refresh(): Promise<void> {
    this._fetchedAt = Date.now();
    try {
      const jobs = await this._fetch(MAX_JOBS);
      this._jobs = new Map(jobs.map(job => [job.id, job]));
      this._become({ kind: 'ready', jobs });
    } catch (error) {
      this._become({ kind: 'refused', message: error instanceof Error ? error.message : String(error) });
    }
  }

  dispose(): void {
    Signal.clearData(this);
  }

  private _follow(_: GpuModel, state: GpuState): void {
    if (state.kind === 'unreachable') {
      this._wasSilent = true;
    } else if (state.kind === 'ready') {
      // A list that could not be fetched is fetched after the next change.
      if (this._wasSilent || this._state.kind === 'refused' || this._isBehind(state.status.jobs)) {
        this._wasSilent = false;
        void this.refresh();
      }
      if (this._state.kind === 'ready') {
        for (const job of state.status.jobs) {
          this._jobs.set(job.id, job);
        }
        this._become({ kind: 'ready', jobs: [...this._jobs.values()] });
        return;
      }
    }
    this._changed.emit();
  }

  private _isBehind(reported: readonly IJob[]): boolean {
    if (Date.now() - this._fetchedAt < AGAIN_MS) {
      return false;
    }
    const ids = new Set(reported.map(job => job.id));
    return [...this._jobs.values()].some(job => !ENDED.has(job.state) && !ids.has(job.id));
  }

  private _become(state: JobsState): void {
    this._state = state;
    this._changed.emit();
  }

  private readonly _changed = new Signal<this, void>(this);
  private _jobs = new Map<string, IJob>();
  private _state: JobsState = { kind: 'loading' };
  private _view: IView = FIRST_VIEW;
  private _wasSilent = false;
  private _fetchedAt = 0;
  private _fetching: Promise<void> | null = null;
}
