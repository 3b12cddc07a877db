import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { GpuModel } from '../src/model';
import { GpuState, jobNotices, leaseNotice, Notice, phaseOf, seenJobs, stateOf } from '../src/state';
import { IJob, ILeaseStatus } from '../src/wire';
import { StatusAnswer } from '../src/state';
import { noticeText } from '../src/messages';
import { ANSWERS, NO_ANSWER } from './answers';
import './trans';

function lease(name: keyof typeof ANSWERS, change: Partial<ILeaseStatus> = {}): ILeaseStatus {
  return { ...ANSWERS[name].leases[0]!, ...change };
}

describe('phaseOf', () => {
  it('tells what each golden lease is for a person', () => {
    expect(phaseOf(lease('active'))).toBe('active');
    expect(phaseOf(lease('warned'))).toBe('warned');
    expect(phaseOf(lease('asleep'))).toBe('asleep');
    expect(phaseOf(lease('waking'))).toBe('waking');
    expect(phaseOf(lease('lost'))).toBe('lost');
  });

  it('is lost, idle or not, until its kernels were restarted', () => {
    expect(phaseOf(lease('lost', { idle_s: 600, lend_in_s: 10 }))).toBe('lost');
    expect(phaseOf(lease('lost', { state: 'released' }))).toBe('ended');
  });

  it('is waking as soon as a process wants the GPU', () => {
    expect(phaseOf(lease('asleep', { wanted: true }))).toBe('waking');
  });

  it('is warned when the broker says so, whatever the numbers', () => {
    expect(phaseOf(lease('active', { idle_s: 600, lend_in_s: 10, warned: false }))).toBe('idle');
    expect(phaseOf(lease('active', { idle_s: 6, lend_in_s: 4, warned: true }))).toBe('warned');
  });
});

describe('leaseNotice', () => {
  it('takes a warning back when the owner is active again', () => {
    expect(leaseNotice('warned', lease('active'), null)).toEqual({ kind: 'cleared' });
  });

  it('is not told that the GPU is back when the driver refused to put it to sleep', () => {
    expect(leaseNotice('falling-asleep', lease('active'), null)).toBeNull();
  });
});

describe('jobNotices', () => {
  const id = 'k3v9m2x7qa';
  const jobs = ANSWERS.active.jobs;
  const with_ = (change: Partial<IJob>): IJob[] =>
    jobs.map(job => (job.id === id ? { ...job, ...change } : job));

  it('tells of a job that ended, but of none that had ended before', () => {
    const now = with_({ state: 'succeeded' });
    expect(jobNotices(seenJobs(jobs), now)).toMatchObject([{ kind: 'job-ended', job: { name: 'night' } }]);
    expect(jobNotices(seenJobs(now), now)).toEqual([]);
  });

  it('tells of every pause, whether it sleeps or is back in the queue', () => {
    const paused = with_({ state: 'suspended', preemptions: 1 });
    expect(jobNotices(seenJobs(jobs), paused)).toMatchObject([{ kind: 'job-paused', job: { id } }]);
    expect(jobNotices(seenJobs(paused), paused)).toEqual([]);
    const again = with_({ state: 'queued', preemptions: 2 });
    expect(jobNotices(seenJobs(paused), again)).toMatchObject([{ kind: 'job-paused' }]);
  });

  const textOf = (before: readonly IJob[], now: readonly IJob[]): string =>
    noticeText(jobNotices(seenJobs(before), now.slice(0, 1))[0] as Extract<Notice, { kind: 'job-paused' }>);

  it('says that nothing was lost only of a job that goes on where it was', () => {
    const queued = with_({ state: 'queued', attempt: 0 });
    const resumed = with_({ state: 'running', attempt: 1, preemptions: 1 });
    for (const before of [queued, with_({ attempt: 1 }), []]) {
      expect(textOf(before, resumed)).toBe('night was paused meanwhile. Nothing was lost.');
    }
    const again = with_({ state: 'running', attempt: 2, preemptions: 1 });
    for (const before of [queued, with_({ attempt: 1 })]) {
      expect(textOf(before, again)).toBe(
        'night had to give up its GPU meanwhile, and started again as attempt 2.'
      );
    }
    expect(textOf(again, with_({ state: 'running', attempt: 2, preemptions: 2 }))).toMatch(/Nothing was lost/);
  });

  it('says what the broker says of a job that is paused', () => {
    const requeued = with_({ state: 'queued', attempt: 1, preemptions: 1, reason: 'Number 1.' });
    expect(textOf(jobs, requeued)).toBe('night: Number 1.');
  });

  it('tells nothing of jobs that had ended when the others were seen', () => {
    expect(jobNotices({ ...seenJobs(jobs), living: {} }, with_({ state: 'failed' }))).toEqual([]);
  });

  it('tells of an end also where the answer before left the job out', () => {
    const other = later(0, { state: 'succeeded', ended_at: '2031-06-01T10:00:00.000Z' });
    const before = { ...seenJobs([...jobs, other]), living: {} };
    const since = with_({ state: 'failed', ended_at: '2031-06-01T10:00:00.001Z' });
    expect(jobNotices(before, since)).toMatchObject([{ kind: 'job-ended', job: { id } }]);
    expect(jobNotices(seenJobs(since), since)).toEqual([]);
    const earlier = with_({ state: 'failed', ended_at: '2031-06-01T09:59:59.999Z' });
    expect(jobNotices(before, earlier)).toEqual([]);
    const first = { ...seenJobs(jobs.filter(job => job.ended_at === null)), living: {} };
    expect(jobNotices(first, since)).toMatchObject([{ job: { id } }, { job: { id: 'c5t0r9y2ub' } }]);
  });

  it('has seen the same, and so saves nothing, while jobs only go on', () => {
    const goneOn = jobs.map(job => ({ ...job, ran_s: job.ran_s + 5, waited_s: job.waited_s + 5, done: 17 }));
    expect(seenJobs(goneOn)).toEqual(seenJobs(jobs));
  });

  const later = (n: number, change: Partial<IJob>): IJob => ({
    ...jobs[0]!,
    id: `later${n}`,
    submitted_at: `2031-06-01T10:00:0${n}Z`,
    ...change
  });

  it('tells of a job that began and ended, or was paused, since', () => {
    const ended = later(1, { state: 'succeeded' });
    const paused = later(2, { state: 'suspended', preemptions: 1 });
    const running = later(3, { state: 'running', preemptions: 0 });
    expect(jobNotices(seenJobs(jobs), [ended, paused, running, ...jobs])).toMatchObject([
      { kind: 'job-ended', job: { id: ended.id } },
      { kind: 'job-paused', job: { id: paused.id } }
    ]);
    expect(jobNotices(seenJobs([]), [ended])).toMatchObject([{ kind: 'job-ended' }]);
  });

  it('tells nothing of a job whose owner did not want to be told', () => {
    const quiet = with_({ state: 'failed', notify: false });
    expect(jobNotices(seenJobs(jobs), quiet)).toEqual([]);
  });

  it('tells of many at once in one', () => {
    const many = [1, 2, 3, 4].map(n => later(n, { state: n === 4 ? 'failed' : 'succeeded' }));
    const notices = jobNotices(seenJobs(jobs), [...many, ...jobs]);
    expect(notices).toMatchObject([{ kind: 'jobs', paused: [] }]);
    expect(noticeText(notices[0] as Extract<Notice, { kind: 'jobs' }>)).toBe(
      'Training jobs: 4 jobs ended, 1 of them failed.'
    );
  });
});

describe('stateOf', () => {
  it('finds the lease of this server among those of the user', () => {
    const other = { ...ANSWERS.active, server: 'other' };
    expect(stateOf(ANSWERS.active)).toMatchObject({ kind: 'ready', lease: { id: 'b7q2mzk4x9' } });
    expect(stateOf(other)).toMatchObject({ kind: 'ready', lease: null });
  });

  it('has no numbers beside a silence', () => {
    expect(stateOf(NO_ANSWER)).toEqual({ kind: 'unreachable', since: new Date('2031-05-06T14:02:00Z'), source: 'broker' });
    expect(stateOf({ enabled: false })).toEqual({ kind: 'off' });
  });
});

describe('GpuModel', () => {
  let model: GpuModel;
  let answer: StatusAnswer | Error = ANSWERS.active;
  let asked = 0;
  const changed: string[][] = [];

  /** Requests in flight now, and their maximum; a slow answer takes a turn of the timers. */
  let open = 0;
  let most = 0;
  let slow = false;

  /** An answer with a lease that began to run this many seconds before. */
  function awakeFor(seconds: number): StatusAnswer {
    const since_at = new Date(Date.parse(ANSWERS.active.at) - 1000 * seconds).toISOString();
    return { ...ANSWERS.active, leases: [{ ...ANSWERS.active.leases[0]!, since_at }] };
  }

  async function start(first: StatusAnswer | Error): Promise<Notice[]> {
    answer = first;
    asked = open = most = 0;
    slow = false;
    const notices: Notice[] = [];
    model = new GpuModel({
      status: async () => {
        asked += 1;
        most = Math.max(most, ++open);
        await (slow ? new Promise(resolve => setTimeout(resolve)) : undefined);
        open -= 1;
        if (answer instanceof Error) {
          throw answer;
        }
        return answer;
      },
      changeLease: async (...args) => changed.push(args.map(String))
    });
    model.intervalMs = 1e9;
    model.noticed.connect((_, notice) => notices.push(notice));
    await until(state => state.kind !== 'loading');
    return notices;
  }

  function until(holds: (state: GpuState) => boolean): Promise<void> {
    return new Promise(resolve => {
      const look = (): void => {
        if (holds(model.state)) {
          model.changed.disconnect(look);
          resolve();
        }
      };
      model.changed.connect(look);
      look();
    });
  }

  function fakeAllTimers(): void {
    vi.useRealTimers();
    vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout', 'Date'] });
  }

  async function say(next: StatusAnswer | Error): Promise<void> {
    answer = next;
    await model.refresh();
  }

  beforeEach(() => {
    vi.useFakeTimers({ now: 0, toFake: ['Date'] });
  });
  afterEach(() => {
    model.dispose();
    vi.useRealTimers();
  });

  it('tells the story of a suspension, each thing once', async () => {
    const notices = await start(ANSWERS.active);
    await say(ANSWERS.warned);
    await say(ANSWERS.warned);
    await say(ANSWERS.asleep);
    vi.setSystemTime(10_000);
    await say(ANSWERS.waking);
    await say(ANSWERS.waking);
    vi.setSystemTime(17_000);
    await say(awakeFor(0));
    expect(notices.map(notice => notice.kind)).toEqual(['warned', 'asleep', 'waking', 'back']);
    expect(notices[3]).toMatchObject({ seconds: 7 });
  });

  it('draws all widgets anew with settings that arrive late, without a notice', async () => {
    const notices = await start(ANSWERS.warned);
    const drawn: GpuState[] = [];
    model.changed.connect((_, state) => drawn.push(state));
    model.redraw();
    expect(drawn).toEqual([model.state]);
    expect(notices).toEqual([]);
  });

  it('counts the seconds of waking, not those until somebody looks again', async () => {
    vi.setSystemTime(10_000);
    const notices = await start(ANSWERS.asleep);
    await say(ANSWERS.waking);
    expect(model.wakingSince).toBe(10_000);
    vi.setSystemTime(610_000);
    await say(awakeFor(592));
    expect(notices[1]).toMatchObject({ kind: 'back', seconds: 8 });
    expect(model.wakingSince).toBeNull();
  });

  it('counts no seconds of a waking that it did not see begin', async () => {
    const notices = await start(ANSWERS.waking);
    await say(ANSWERS.waking);
    expect(model.wakingSince).toBeNull();
    await say(awakeFor(0));
    expect(notices).toMatchObject([{ kind: 'back', seconds: null }]);
  });

  it('counts no seconds of a waking that began while nobody looked', async () => {
    const notices = await start(ANSWERS.asleep);
    answer = ANSWERS.waking;
    await model.refreshAfterAbsence();
    expect(model.wakingSince).toBeNull();
    await say(ANSWERS.waking);
    expect(model.wakingSince).toBeNull();
    await say(awakeFor(0));
    expect(notices).toMatchObject([{ kind: 'waking' }, { kind: 'back', seconds: null }]);
    await say(ANSWERS.asleep);
    await say(NO_ANSWER);
    await say(ANSWERS.waking);
    expect(model.wakingSince).toBeNull();
    await say(ANSWERS.asleep);
    await say(ANSWERS.waking);
    expect(model.wakingSince).toBe(Date.now());
  });

  it('goes on counting the seconds of a waking that it saw begin, after a look away', async () => {
    vi.setSystemTime(10_000);
    await start(ANSWERS.asleep);
    await say(ANSWERS.waking);
    vi.setSystemTime(13_000);
    await model.refreshAfterAbsence();
    expect(model.wakingSince).toBe(10_000);
  });

  it('keeps no numbers of a server that does not answer at all', async () => {
    fakeAllTimers();
    let hangs = false;
    model = new GpuModel({
      status: async signal => {
        if (hangs) {
          await new Promise((_, fail) => signal.addEventListener('abort', () => fail(new Error('aborted'))));
        }
        return ANSWERS.active;
      },
      changeLease: async () => undefined
    });
    await vi.advanceTimersByTimeAsync(5_000);
    hangs = true;
    await vi.advanceTimersByTimeAsync(40_000);
    expect(model.state).toMatchObject({ kind: 'unreachable', source: 'server' });
    hangs = false;
    await vi.advanceTimersByTimeAsync(300_000);
    expect(model.state.kind).toBe('ready');
  });

  it('asks one question at a time, and once more for all that came meanwhile', async () => {
    await start(ANSWERS.active);
    slow = true;
    await Promise.all(Array.from({ length: 5 }, () => model.refresh()));
    expect(most).toBe(1);
    expect(asked).toBeLessThanOrEqual(3);
  });

  it('never says that nothing was lost where the memory could not be brought back', async () => {
    const notices = await start(ANSWERS.asleep);
    await say(ANSWERS.waking);
    await say(ANSWERS.lost);
    await say(ANSWERS.lost);
    expect(notices.map(notice => notice.kind)).toEqual(['waking', 'lost']);
    expect(noticeText(notices[1] as Extract<Notice, { kind: 'lost' }>)).toBe(
      'Your GPU memory could not be brought back: the kernels that used it have to restart. Your files are safe.'
    );
    await say(ANSWERS.active);
    expect(notices.map(notice => notice.kind)).toEqual(['waking', 'lost', 'cleared']);
  });

  it('takes back that the memory is lost when the lease is gone', async () => {
    const notices = await start(ANSWERS.waking);
    await say(ANSWERS.lost);
    await say(ANSWERS.empty);
    expect(notices.map(notice => notice.kind)).toEqual(['lost', 'cleared']);
  });

  it('tells nothing for what it finds at the start', async () => {
    expect(await start(ANSWERS.asleep)).toEqual([]);
  });

  it('tells what became of jobs that an earlier page saw alive, once', async () => {
    const ended = ANSWERS.active.jobs.find(job => job.state === 'failed')!;
    const notices = await start(ANSWERS.active);
    const living = { [ended.id]: { preemptions: 0, attempt: 1 } };
    model.catchUp({ ...seenJobs(ANSWERS.active.jobs), living });
    expect(notices).toMatchObject([{ kind: 'job-ended', job: { id: ended.id } }]);
    await say(ANSWERS.active);
    expect(notices.length).toBe(1);
  });

  it('keeps ten minutes of samples, and none from before a silence', async () => {
    vi.setSystemTime(0);
    await start(ANSWERS.active);
    for (let n = 1; n <= 1000; n++) {
      vi.setSystemTime(5_000 * n);
      await say(ANSWERS.active);
    }
    expect(model.samples.all.length).toBe(121);
    await say(NO_ANSWER);
    expect(model.samples.all).toEqual([]);
    await say(ANSWERS.empty);
    expect(model.samples.all).toEqual([]);
  });

  it('has no numbers while the broker is silent, and tells afterwards what was missed', async () => {
    const notices = await start(ANSWERS.active);
    await say(NO_ANSWER);
    expect(model.state).toEqual({ kind: 'unreachable', since: new Date('2031-05-06T14:02:00Z'), source: 'broker' });
    await say(ANSWERS.asleep);
    expect(model.state.kind).toBe('ready');
    expect(notices.map(notice => notice.kind)).toEqual(['asleep']);
  });

  it('remembers since when its own server does not answer', async () => {
    vi.setSystemTime(5_000);
    await start(ANSWERS.active);
    await say(new Error('connection refused'));
    vi.setSystemTime(9_000);
    await say(new Error('connection refused'));
    expect(model.state).toEqual({ kind: 'unreachable', since: new Date(5_000), source: 'server' });
  });

  it('asks ever more rarely while nobody answers, every five minutes at last, and at once as before', async () => {
    fakeAllTimers();
    const at_s: number[] = [];
    let silent = true;
    model = new GpuModel({
      status: async () => {
        at_s.push(Date.now() / 1000);
        if (silent) {
          throw new Error('connection refused');
        }
        return ANSWERS.active;
      },
      changeLease: async () => undefined
    });
    await vi.advanceTimersByTimeAsync(3_600_000);
    const pauses_s = at_s.slice(1).map((at, n) => Math.round(at - at_s[n]!));
    expect(pauses_s.slice(0, 6)).toEqual([10, 20, 40, 80, 160, 300]);
    expect(new Set(pauses_s.slice(5))).toEqual(new Set([300]));
    expect(pauses_s.length).toBeGreaterThan(10);
    silent = false;
    await vi.advanceTimersByTimeAsync(300_000);
    const heard = at_s.length;
    await vi.advanceTimersByTimeAsync(60_000);
    expect(at_s.length - heard).toBe(12);
  });

  it('asks no more where there is no broker', async () => {
    await start({ enabled: false });
    await model.refresh();
    expect(asked).toBe(1);
  });

  it('changes its own lease and looks again', async () => {
    await start(ANSWERS.warned);
    await model.change('keep', 45);
    expect(changed).toEqual([['b7q2mzk4x9', 'keep', '45']]);
    expect(asked).toBe(2);
  });

  it('changes nothing without a lease', async () => {
    changed.length = 0;
    await start(ANSWERS.empty);
    await model.change('lend');
    expect(changed).toEqual([]);
  });

  it('says nothing once it is disposed', async () => {
    const notices = await start(ANSWERS.active);
    model.dispose();
    await say(ANSWERS.asleep);
    expect(notices).toEqual([]);
    expect(model.state).toMatchObject({ lease: { state: 'running' } });
  });
});
