import { describe, expect, it, vi } from 'vitest';

import { FIRST_VIEW, IView, JobsModel, neighbourOf, viewOf } from '../src/jobs';
import { BLANK, changeOf, fieldsOf, requestOf } from '../src/launch';
import { GpuModel } from '../src/model';
import { IJob } from '../src/wire';
import { StatusAnswer } from '../src/state';
import { ANSWERS, JOBS, NO_ANSWER } from './answers';
import './trans';

function job(change: Partial<IJob>): IJob {
  return { ...JOBS[0]!, ...change };
}

const MANY: IJob[] = [
  job({ id: 'a', name: 'night', state: 'running', ran_s: 10, waited_s: 1, submitted_at: '1', done: 1, total: 4 }),
  job({ id: 'b', name: 'Day', state: 'queued', ran_s: 0, waited_s: 9, submitted_at: '2', done: null }),
  job({ id: 'c', name: 'dusk', state: 'failed', ran_s: 5, waited_s: 2, submitted_at: '3', command: ['python', 'x.py'] }),
  job({ id: 'd', name: 'dawn', state: 'succeeded', ran_s: 5, waited_s: 3, submitted_at: '4' })
];

function ids(view: Partial<IView>): string {
  return viewOf(MANY, { ...FIRST_VIEW, ...view })
    .map(each => each.id)
    .join('');
}

describe('viewOf', () => {
  it('has the living ones first', () => {
    expect(ids({})).toBe('abcd');
  });

  it('has the next to start before those behind it, however new they are', () => {
    const queued = [3, 1, null, 2].map((position, n) =>
      job({ id: String(position), state: 'queued', position, submitted_at: String(n) })
    );
    expect(viewOf(queued, FIRST_VIEW).map(each => each.id)).toEqual(['1', '2', '3', 'null']);
  });

  it('filters by state and by every word, in name, command and state', () => {
    expect(ids({ show: 'living' })).toBe('ab');
    expect(ids({ show: 'ended' })).toBe('cd');
    expect(ids({ show: 'failed' })).toBe('c');
    expect(ids({ text: 'D' })).toContain('b');
    expect(ids({ text: 'x.py fail' })).toBe('c');
    expect(ids({ text: 'nothing' })).toBe('');
  });

  it('finds the words that the list shows for a state', () => {
    const view = { ...FIRST_VIEW, text: 'done' };
    expect(viewOf(MANY, view).map(each => each.id)).toEqual(['d']);
    expect(viewOf(MANY, { ...view, text: 'succeeded' }).map(each => each.id)).toEqual(['d']);
  });

  it('sorts by what was asked for, equals by time', () => {
    expect(ids({ column: 'name' })).toBe('dbca');
    expect(ids({ column: 'ran' })).toBe('bdca');
    expect(ids({ column: 'ran', descending: true })).toBe('adcb');
    expect(ids({ column: 'waited', descending: true })).toBe('bdca');
    expect(ids({ column: 'progress' })).toBe('badc');
  });

  it('sorts sizes as numbers, those in memory first', () => {
    const sizes = ['10', '1/2', '2', '0.25'].map(gpus => job({ id: gpus, gpus, memory: null, profile: null }));
    const all = [...sizes, job({ id: '20GiB', gpus: '1', memory: '20GiB' })];
    const sorted = viewOf(all, { ...FIRST_VIEW, column: 'size' }).map(each => each.id);
    expect(sorted).toEqual(['20GiB', '0.25', '1/2', '2', '10']);
  });

  it('leaves the list itself alone', () => {
    ids({ column: 'ran' });
    expect(MANY.map(each => each.id).join('')).toBe('abcd');
  });
});

describe('JobsModel', () => {
  function gpuOf(answer: () => StatusAnswer): GpuModel {
    const gpu = new GpuModel({ status: async () => answer(), changeLease: async () => undefined });
    gpu.intervalMs = 1e9;
    return gpu;
  }

  it('fetches all, then follows the status; after a silence it fetches again', async () => {
    let answer: StatusAnswer = ANSWERS.active;
    let fetched = 0;
    const gpu = gpuOf(() => answer);
    const old = job({ id: 'old', state: 'succeeded' });
    const jobs = new JobsModel(gpu, async () => {
      fetched += 1;
      return [...ANSWERS.active.jobs, old];
    });
    expect(jobs.state).toEqual({ kind: 'loading' });
    await jobs.refresh();
    const before = ANSWERS.active.jobs[0]!;
    answer = { ...ANSWERS.active, jobs: [{ ...before, state: 'succeeded' }] };
    await gpu.refresh();
    expect(jobs.job(before.id)?.state).toBe('succeeded');
    expect(jobs.job('old')).toEqual(old);
    expect(fetched).toBe(1);
    const second = ANSWERS.active.jobs[1]!;
    jobs.put({ ...second, state: 'cancelled' });
    answer = { ...ANSWERS.active, jobs: [] }; // ended ones may be left out
    await gpu.refresh();
    expect(jobs.job(second.id)?.state).toBe('cancelled');
    expect(fetched).toBe(1);
    answer = NO_ANSWER;
    await gpu.refresh();
    answer = ANSWERS.active;
    await gpu.refresh();
    expect(fetched).toBe(2);
    jobs.dispose();
    gpu.dispose();
  });

  it('fetches the list again when it has a living job that the status does not tell of', async () => {
    let answer: StatusAnswer = ANSWERS.active;
    vi.useFakeTimers({ now: 0, toFake: ['Date'] });
    const gpu = gpuOf(() => answer);
    const beyond = job({ id: 'beyond', state: 'running' });
    let list = [...ANSWERS.active.jobs, beyond];
    const fetched: number[] = [];
    const jobs = new JobsModel(gpu, async () => {
      fetched.push(Date.now());
      return list;
    });
    const step = async (ms: number): Promise<void> => {
      vi.setSystemTime(ms);
      answer = { ...ANSWERS.active };
      await gpu.refresh();
      await vi.waitFor(() => expect(jobs.state.kind).toBe('ready'));
    };
    await jobs.refresh();
    await step(5_000);
    await step(29_000);
    expect(fetched).toEqual([0]);
    await step(30_000);
    list = [...ANSWERS.active.jobs, { ...beyond, state: 'succeeded' }];
    await step(35_000);
    await step(60_000);
    await vi.waitFor(() => expect(jobs.job('beyond')?.state).toBe('succeeded'));
    await step(95_000);
    expect(fetched).toEqual([0, 30_000, 60_000]);
    jobs.dispose();
    gpu.dispose();
    vi.useRealTimers();
  });

  it('says why there is no list, until there is one', async () => {
    const gpu = gpuOf(() => ANSWERS.active);
    let refuses = true;
    let fetched = 0;
    const jobs = new JobsModel(gpu, async () => {
      fetched += 1;
      if (refuses) {
        throw new Error('not now');
      }
      return [];
    });
    await Promise.all([jobs.refresh(), jobs.refresh()]);
    expect(jobs.state).toEqual({ kind: 'refused', message: 'not now' });
    expect(fetched).toBe(1);
    refuses = false;
    await gpu.refresh();
    await vi.waitFor(() => expect(jobs.state.kind).toBe('ready'));
    jobs.dispose();
    gpu.dispose();
  });
});

const WAITS: IJob = { ...JOBS[0]!, state: 'queued', attempt: 0, priority: 0 };

describe('neighbourOf', () => {
  it('is the job of mine beside it that waits in the same project with the same priority', () => {
    const queue: readonly IJob[] = [
      { ...WAITS, id: 'c', position: 7 },
      { ...WAITS, id: 'ran', position: 3, attempt: 1 },
      { ...WAITS, id: 'a', position: 2 },
      { ...WAITS, id: 'other', position: 4, project: 'elsewhere' },
      { ...WAITS, id: 'high', position: 1, priority: 5 },
      { ...WAITS, id: 'b', position: 5 },
      { ...WAITS, id: 'runs', position: null, state: 'running', attempt: 1 }
    ];
    const of = (id: string, step: -1 | 1): string | undefined =>
      neighbourOf(queue, queue.find(job => job.id === id)!, step)?.id;
    expect(['a', 'b', 'c'].map(id => of(id, -1))).toEqual([undefined, 'a', 'b']);
    expect(['a', 'b', 'c'].map(id => of(id, 1))).toEqual(['b', 'c', undefined]);
    expect(['ran', 'runs'].map(id => of(id, 1))).toEqual([undefined, undefined]);
  });
});

describe('changeOf', () => {
  const NONE = { gpus: null, memory: null, profile: null, project: null, priority: null, max_run_s: null };
  const job: IJob = { ...WAITS, gpus: '2', memory: null, profile: null, project: 'nlp', max_run_s: 3600 };
  const fields = { ...BLANK, ...fieldsOf(job) };

  it('sends nothing for a dialog that changes nothing', () => {
    expect(changeOf(job, requestOf(fields))).toEqual(NONE);
  });

  it('sends what differs, a size as a whole, and 0 for no maximum', () => {
    const changed = requestOf({ ...fields, size: 'memory', memory: '20GiB', priority: '-5', maxRun: '' });
    expect(changeOf(job, changed)).toEqual({ ...NONE, gpus: '1', memory: '20GiB', priority: -5, max_run_s: 0 });
  });
});
