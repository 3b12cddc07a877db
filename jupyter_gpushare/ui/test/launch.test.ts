import { afterEach, describe, expect, it, vi } from 'vitest';

import {
  BLANK,
  fieldsOf,
  IFields,
  LaunchModel,
  problemsOf,
  requestOf,
  takenFromServer
} from '../src/launch';
import { pairsOf } from '../src/typed';
import { IJob, ILaunchForm, ILaunchRequest, IOffers } from '../src/wire';
import { JOB, OFFERS } from './answers';
import './trans';

function fields(change: Partial<IFields> = {}): IFields {
  return { ...BLANK, path: 'train.py', ...change };
}

describe('what is typed', () => {
  it.each(['1', '2', '1024', '0.5', '.25', '1/4', '1.0', '3/3'])('takes %s as GPUs', text => {
    expect(problemsOf(fields({ gpus: text }))).toEqual({});
  });

  it.each(['', '0', '1.5', '1/0', '0/4', '-1', 'x', '1e3', '0.0', '1/2/3', '00000'])(
    'refuses %s as GPUs',
    text => {
      expect(problemsOf(fields({ gpus: text }))).toHaveProperty('gpus');
    }
  );

  it('reads parameters line by line', () => {
    expect(pairsOf('lr = 0.1\n\n name= a = b ')).toEqual({ lr: '0.1', name: 'a = b' });
    expect(pairsOf('größe = 3\n学習率=0.1\nα_1 = a')).toEqual({ größe: '3', 学習率: '0.1', α_1: 'a' });
    expect(pairsOf('मात्रा = 1')).toEqual({ मात्रा: '1' });
    expect(pairsOf('x² = 3')).toBeNull();
    expect(pairsOf('lr 0.1')).toBeNull();
    expect(pairsOf('1a = 2')).toBeNull();
  });

  it('has no problems as the dialog begins', () => {
    expect(problemsOf(fields())).toEqual({});
  });

  it('has no problem with what is not there: parameters of a script', () => {
    expect(problemsOf(fields({ parameters: 'x' }))).toEqual({});
    expect(requestOf(fields({ parameters: 'x' })).parameters).toEqual({});
  });

  it.each([
    [{ path: '', command: ' ' }, 'command'],
    [{ path: 'a.ipynb', parameters: 'x' }, 'parameters'],
    [{ variables: 'A=1\nB C' }, 'variables'],
    [{ cwd: 'here' }, 'cwd'],
    [{ gpus: '1.5' }, 'gpus'],
    [{ size: 'memory', memory: '20 apples' }, 'memory'],
    [{ size: 'memory', memory: '20kiB' }, 'memory'],
    [{ name: 'x'.repeat(101) }, 'name'],
    [{ retries: '11' }, 'retries'],
    [{ maxRun: '4' }, 'maxRun'],
    [{ priority: '-' }, 'priority'],
    [{ priority: '101' }, 'priority']
  ] as [Partial<IFields>, string][])('says what is wrong with %j', (change, field) => {
    expect(Object.keys(problemsOf(fields(change)))).toEqual([field]);
  });

  it('is sent as what it means', () => {
    expect(requestOf(fields({ path: 'a.ipynb', parameters: 'lr = 1', arguments: 'old' }))).toMatchObject({
      path: 'a.ipynb',
      parameters: { lr: '1' },
      arguments: '',
      command: '',
      gpus: '1',
      memory: null,
      cwd: null,
      name: null
    });
    expect(requestOf(fields({ size: 'memory', memory: '20 GiB', variables: 'A=1\n\nB' }))).toMatchObject({
      memory: '20GiB',
      variables: ['A=1', 'B']
    });
    expect(requestOf(fields({ path: '', command: 'ls', kernel: 'python3' }))).toMatchObject({
      command: 'ls',
      kernel: '',
      borrow: true,
      move: true,
      share: false,
      notify: true
    });
    expect(requestOf(fields({ path: 'a.py', borrow: false, move: false, share: true, notify: false }))).toMatchObject({
      borrow: false,
      move: false,
      share: true,
      notify: false
    });
  });
});

describe('a duplicate', () => {
  it('has everything of the first one', () => {
    expect(requestOf({ ...BLANK, ...fieldsOf({ ...JOB, move: false }) })).toMatchObject({
      move: false,
      path: JOB.source!.path,
      parameters: { lr: '0.1' },
      gpus: JOB.gpus,
      borrow: JOB.borrow,
      share: JOB.share,
      notify: JOB.notify,
      project: JOB.project,
      variables: ['WANDB_MODE'],
      checkpoint: JOB.checkpoint
    });
  });

  it('has the MIG profile, the priority, the grace and the maximum run time of the first one', () => {
    const job = { ...JOB, gpus: '1', profile: '1g.10gb', priority: -5, grace_s: 90, max_run_s: 5400 };
    const duplicate = { ...BLANK, ...fieldsOf(job) };
    expect(requestOf(duplicate)).toMatchObject({
      profile: '1g.10gb',
      gpus: '1',
      memory: null,
      priority: -5,
      grace_s: 90,
      max_run_s: 5400
    });
    expect(requestOf({ ...duplicate, size: 'gpus', gpus: '2' })).toMatchObject({ profile: null, gpus: '2' });
    expect(requestOf({ ...duplicate, size: 'memory', memory: '1GiB' })).toMatchObject({ profile: null });
    expect(problemsOf(duplicate)).toEqual({});
  });

  it('knows the variables whose value it takes from this server', () => {
    expect(takenFromServer({ ...BLANK, ...fieldsOf(JOB) })).toEqual(['WANDB_MODE']);
    expect(takenFromServer(fields({ variables: 'A=1\n B \n\nC=' }))).toEqual(['B']);
  });

  it('of a command is the command again, quoted where it has to be', () => {
    const job = { ...JOB, source: null, command: ['python', '-c', "print('a b')", 'x/y.z'] };
    expect(fieldsOf(job).command).toBe(`python -c 'print('"'"'a b'"'"')' x/y.z`);
  });
});

describe('LaunchModel', () => {
  const form: ILaunchForm = {
    path: 'a.ipynb',
    kind: 'notebook',
    cwd: '/home/ada',
    kernel: 'python3',
    environments: [],
    parameters: { lr: '0.1' }
  };
  let model: LaunchModel;
  const asked: unknown[] = [];
  const sent: [ILaunchRequest, string][] = [];

  function open(
    first: Partial<IFields>,
    options: {
      form?: (path: string) => Promise<ILaunchForm>;
      offers?: () => Promise<IOffers>;
      launch?: () => Promise<IJob>;
      isHidden?: () => boolean;
    } = {}
  ): void {
    vi.useFakeTimers();
    asked.length = sent.length = 0;
    model = new LaunchModel({
      fields: first,
      launchForm: async path => (options.form === undefined ? form : options.form(path)),
      offers: async query => {
        asked.push(query);
        return options.offers === undefined ? OFFERS : options.offers();
      },
      launch: async (request, key) => {
        sent.push([request, key]);
        return options.launch === undefined ? JOB : options.launch();
      },
      projects: () => ['vision', 'nlp'],
      isHidden: options.isHidden
    });
  }

  afterEach(() => {
    model.dispose();
    vi.useRealTimers();
  });

  it('begins with what the file and the broker say, and keeps what was typed', async () => {
    open({ path: 'a.ipynb', kernel: 'torch' });
    await vi.advanceTimersByTimeAsync(0);
    expect(model.fields).toMatchObject({
      cwd: '/home/ada',
      kernel: 'torch',
      parameters: 'lr = 0.1',
      project: OFFERS.project
    });
    expect(model.outlook).toMatch(/^Number 3\. Needs 2 GPUs/);
  });

  it('asks for the newest size only, when the typing pauses', async () => {
    open({ path: 'a.ipynb' });
    await vi.advanceTimersByTimeAsync(0);
    model.set({ gpus: '0.' });
    model.set({ gpus: '0.5' });
    await vi.advanceTimersByTimeAsync(299);
    expect(asked.length).toBe(1);
    await vi.advanceTimersByTimeAsync(1);
    expect(asked.slice(1)).toEqual([
      { project: OFFERS.project, gpus: '0.5', memory: '', profile: '', borrow: '', share: '' }
    ]);
    model.set({ borrow: false });
    await vi.advanceTimersByTimeAsync(300);
    expect(asked[2]).toMatchObject({ gpus: '0.5', borrow: '0' });
    model.set({ gpus: 'x' });
    await vi.advanceTimersByTimeAsync(300);
    expect(asked.length).toBe(3);
    expect(model.outlook).toBe('');
  });

  it('asks as one that shares only where the job would be suspended', async () => {
    open({ path: 'a.ipynb' });
    expect(model.shares).toBe(false);
    await vi.advanceTimersByTimeAsync(0);
    expect(model.shares).toBe(OFFERS.shares);
    model.set({ share: true });
    await vi.advanceTimersByTimeAsync(300);
    expect(asked[1]).toMatchObject({ share: '1' });
    model.set({ checkpoint: 'sigterm' });
    await vi.advanceTimersByTimeAsync(300);
    expect(asked[2]).toMatchObject({ share: '' });
  });

  it('asks again while somebody looks, and says what was said until then', async () => {
    let hidden = false;
    let job = OFFERS.job;
    open({ path: 'a.ipynb' }, { offers: async () => ({ ...OFFERS, job }), isHidden: () => hidden });
    await vi.advanceTimersByTimeAsync(0);
    const news = { ...OFFERS.job!, sentence: 'Would start now.' };
    job = news;
    const said: string[] = [];
    model.changed.connect(() => said.push(model.outlook));
    await vi.advanceTimersByTimeAsync(9_999);
    expect(asked.length).toBe(1);
    await vi.advanceTimersByTimeAsync(1);
    expect(said).toEqual([news.sentence]);
    hidden = true;
    await vi.advanceTimersByTimeAsync(60_000);
    expect(asked.length).toBe(2);
    hidden = false;
    await vi.advanceTimersByTimeAsync(10_000);
    expect(asked.length).toBe(3);
    model.dispose();
    await vi.advanceTimersByTimeAsync(60_000);
    expect(asked.length).toBe(3);
  });

  it('drops an answer that comes when the size is none any more', async () => {
    let answer = (_: IOffers): void => undefined;
    open({ path: 'a.ipynb' }, { offers: () => new Promise(resolve => (answer = resolve)) });
    await vi.advanceTimersByTimeAsync(0);
    model.set({ gpus: 'x' });
    await vi.advanceTimersByTimeAsync(300);
    answer(OFFERS);
    await vi.advanceTimersByTimeAsync(0);
    expect(model.outlook).toBe('');
  });

  it('asks for a MIG instance by its profile', async () => {
    open({ path: 'a.ipynb', size: 'profile', profile: '1g.10gb' });
    await vi.advanceTimersByTimeAsync(0);
    expect(asked).toEqual([{ project: '', gpus: '', memory: '', profile: '1g.10gb', borrow: '', share: '' }]);
  });

  it('offers other projects where that of a duplicate is gone', async () => {
    open({ project: 'gone' }, { offers: () => Promise.reject(new Error('you are not in project gone')) });
    await vi.advanceTimersByTimeAsync(0);
    expect(model.projects).toEqual(['vision', 'nlp']);
  });

  it('shows the refusal of a size that can never run', async () => {
    open({}, { offers: () => Promise.reject(new Error('Asks for 8 GPUs together; the largest machine has 4.')) });
    await vi.advanceTimersByTimeAsync(0);
    expect(model.outlook).toMatch(/^Asks for 8 GPUs/);
  });

  it('submits once, and the same again with the same key', async () => {
    open({ path: 'a.ipynb' });
    await vi.advanceTimersByTimeAsync(0);
    const [first, second] = await Promise.all([model.submit(), model.submit()]);
    expect([first, second]).toEqual([JOB, null]);
    model.set({ name: ' ' });
    await model.submit();
    expect(sent.length).toBe(2);
    expect(sent[0]![1]).toMatch(/^[0-9a-f]{32}$/);
    expect(sent[1]![1]).toBe(sent[0]![1]);
    expect(sent[0]![0].at).toMatch(/^\d{4}-\d\d-\d\dT.*Z$/);
    expect(sent[1]![0]).toEqual(sent[0]![0]);
  });

  it('submits what was changed since as a job of its own', async () => {
    open({ path: 'a.ipynb' }, { launch: () => Promise.reject(new Error('no answer')) });
    await model.submit();
    model.set({ gpus: '2' });
    await model.submit();
    await model.submit();
    const keys = sent.map(([, key]) => key);
    expect(keys.length).toBe(3);
    expect(keys[1]).not.toBe(keys[0]);
    expect(keys[2]).toBe(keys[1]);
  });

  it('says why it was refused, and can be tried again', async () => {
    open({ path: 'a.ipynb' }, { launch: () => Promise.reject(new Error('the queue is full')) });
    expect(await model.submit()).toBeNull();
    expect([model.refusal, model.busy]).toEqual(['the queue is full', false]);
  });

  const formOf = async (path: string): Promise<ILaunchForm> => {
    if (path === 'gone.ipynb') {
      throw new Error('there is no file gone.ipynb');
    }
    return { ...form, path, cwd: `/home/${path}`, kernel: `of ${path}`, parameters: { from: path } };
  };

  it('reads a file that was named at last before it is submitted', async () => {
    open({ path: 'a.ipynb' }, { form: formOf });
    await vi.advanceTimersByTimeAsync(0);
    model.set({ path: 'b.ipynb' });
    expect(await model.submit()).toEqual(JOB);
    expect(sent.map(([request]) => request)).toMatchObject([
      { path: 'b.ipynb', cwd: '/home/b.ipynb', kernel: 'of b.ipynb', parameters: { from: 'b.ipynb' } }
    ]);
  });

  it('submits nothing of a file that cannot be read, and says why', async () => {
    open({ path: 'a.ipynb' }, { form: formOf });
    await vi.advanceTimersByTimeAsync(0);
    model.set({ path: 'gone.ipynb' });
    expect(await model.submit()).toBeNull();
    expect([model.refusal, model.busy, sent.length]).toEqual(['there is no file gone.ipynb', false, 0]);
    model.set({ path: 'a.ipynb' });
    expect(await model.submit()).toEqual(JOB);
  });

  it('submits nothing when yet another file is named while one is read', async () => {
    open({ path: 'a.ipynb' }, { form: formOf });
    await vi.advanceTimersByTimeAsync(0);
    model.set({ path: 'b.ipynb' });
    const submitted = model.submit();
    model.set({ path: 'gone.ipynb' });
    expect(await submitted).toBeNull();
    expect([model.refusal, sent.length]).toEqual(['', 0]);
  });

  it('misses a program only once it was submitted without one, or one was typed and removed', async () => {
    open({});
    expect(model.problems).toHaveProperty('command');
    expect(model.shownProblems).toEqual({});
    model.set({ gpus: 'x' });
    expect(Object.keys(model.shownProblems)).toEqual(['gpus']);
    model.set({ gpus: '1' });
    await model.submit();
    expect(sent).toEqual([]);
    expect(Object.keys(model.shownProblems)).toEqual(['command']);
    open({});
    model.set({ command: 'python' });
    model.set({ command: '' });
    expect(Object.keys(model.shownProblems)).toEqual(['command']);
  });

  it('sends nothing while something is wrong', async () => {
    open({ path: 'a.ipynb', gpus: 'x' });
    expect(await model.submit()).toBeNull();
    expect(sent).toEqual([]);
  });
});
