import { describe, expect, it } from 'vitest';

import { daysOf } from '../src/days';
import { stateOf } from '../src/state';
import {
  asSentence,
  daysText,
  duration,
  environmentText,
  gibibytes,
  jobBadge,
  memoryText,
  momentText,
  noticeText,
  progressAndTimeText,
  progressText,
  projectText,
  sentence,
  sharedText,
  statusText,
  wakingSteps,
  wantsAttention,
  weekText
} from '../src/messages';
import { numberText, timeText } from '../src/locale';
import { ANSWERS, HISTORY, JOB, NO_ANSWER } from './answers';
import './trans';

describe('a refusal', () => {
  it('is a sentence, whatever a server says', () => {
    expect(asSentence("there is no file 'a.py' on this server")).toBe("There is no file 'a.py' on this server.");
    expect(asSentence('grace_s is at most 60 here')).toBe('grace_s is at most 60 here.');
    expect(asSentence('No half GPU is free just now.')).toBe('No half GPU is free just now.');
  });
});

describe('sizes and times', () => {
  it('has one digit below ten and none above', () => {
    expect([0, 6.8, 9.94, 9.96, 40, 160].map(size => gibibytes(size * 2 ** 30))).toEqual([
      '0',
      '6.8',
      '9.9',
      '10',
      '40',
      '160'
    ]);
  });

  it('has one unit', () => {
    expect([0, 89, 90, 5399, 5400].map(seconds => duration(seconds))).toEqual([
      '0 s',
      '89 s',
      '2 min',
      '90 min',
      '2 h'
    ]);
  });
});

describe('a number', () => {
  it('has three digits behind the point, and what the locale puts between thousands', () => {
    const [comma, point] = [(1000).toLocaleString()[1]!, (0.5).toLocaleString()[1]!];
    const told = [120, 1234567.891234, 0.1 + 0.2, 0.000123456, 0, -2.5].map(numberText);
    const expected = ['120', '1,234,567.891', '0.3', '0.000123', '0', '-2.5'];
    expect(told).toEqual(
      expected.map(text => text.replace(/[,.]/g, sign => (sign === ',' ? comma : point)))
    );
  });
});

describe('a time', () => {
  const now = new Date(2031, 4, 6, 15, 0);

  it('is without a day on that day only', () => {
    expect(timeText(new Date(2031, 4, 6, 0, 5, 7), true, now)).toMatch(/^(00|12):05:07( AM)?$/);
    expect(timeText(new Date(2031, 4, 6, 14, 20), false, now)).toMatch(/^(14|2):20( PM)?$/);
    const yesterday = timeText(new Date(2031, 4, 5, 14, 20, 7), true, now);
    expect(yesterday).toMatch(/\b5\b.*\b(14|2):20:07/);
    expect(yesterday).not.toContain('2031');
    expect(timeText(new Date(2030, 4, 6, 14, 20), false, now)).toMatch(/2030.*\b(14|2):20/);
  });
});

describe('a job', () => {
  it('says how far it is, also when nobody knows how far it goes', () => {
    const text = (done: number | null, total: number | null) => progressText({ ...JOB, done, total });
    expect(text(null, null)).toBe('');
    expect(text(120, null)).toBe('120 done');
    expect(text(0, 0)).toBe('0 done');
    expect(text(0.30000000000000004, 10)).toBe(`${numberText(0.3)} of 10`);
  });

  it('says how long it still takes where its progress shows it', () => {
    const text = (change: Partial<typeof JOB>) =>
      progressAndTimeText({ ...JOB, done: 3, total: 10, ends_in: null, ...change });
    expect(text({ left_s: 7_200 })).toBe('3 of 10, about 2 h left');
    expect(text({ left_s: null })).toBe('3 of 10');
    expect(text({ left_s: 7_200, ends_in: { low_s: 5_400, high_s: 9_000 } })).toBe('3 of 10');
  });

  it('has a word for every event in its life, and none of the code', () => {
    const whats = ['submitted', 'grant', 'started', 'suspend', 'resume', 'low-use', 'time_limit', 'would_suspend', 'x'];
    const words = ['Submitted', 'Starting', 'Started', 'Paused', 'Resumed', 'GPU', 'Time limit', 'Note', 'Note'];
    expect(whats.map(what => momentText(what))).toEqual(words);
  });

  it('says what it shares its GPU with, and how fast it is', () => {
    expect([jobBadge(JOB), sharedText(JOB)]).toEqual(['Running, shared', 'with job p4w8n1y6rb; 94 % of its own speed']);
    const guest = { ...JOB, shared: 'guest', shared_with: '', kept_speed_percent: null } as const;
    expect([jobBadge(guest), sharedText(guest)]).toEqual(['Running as a guest', 'as a guest of another job']);
    const alone = { ...JOB, shared: '' } as const;
    expect([jobBadge(alone), sharedText(alone)]).toEqual(['Running', '']);
  });

  it('names the environment that it runs in, and none that nobody knows', () => {
    const source = { path: 'a.py', kernel: '', output: '', arguments: '', parameters: {} };
    const text = (change: Partial<typeof JOB>) => environmentText({ ...JOB, ...change });
    expect(text({ source: { ...source, kernel: 'torch' } })).toBe('torch');
    expect(text({ source })).toBe('of the server');
    expect(text({ source: { ...source, path: 'a.ipynb' } })).toBe('as the notebook says');
    expect(text({ source: null, command: ['/opt/torch/bin/python3.11', '-u', '-c', '1'] })).toBe(
      '/opt/torch/bin/python3.11'
    );
    expect(text({ source: null, command: ['python', 'train.py'] })).toBe('');
    expect(text({ source: null, command: ['/usr/bin/nvidia-smi'] })).toBe('');
  });
});

describe('status bar', () => {
  it('says size, memory and badge', () => {
    expect(statusText(stateOf(ANSWERS.active))).toBe('1/2 GPU 6.8/40 GiB Active');
    expect(statusText(stateOf(ANSWERS.asleep))).toBe('1/2 GPU 0/40 GiB Asleep, GPU lent');
    const late = { ...ANSWERS.asleep.leases[0]!, memory_used_bytes: 2 ** 33 };
    expect(statusText(stateOf({ ...ANSWERS.asleep, leases: [late] }))).toContain(' 0/40 GiB ');
    expect(statusText(stateOf(ANSWERS.lost))).toMatch(/ GPU state lost$/);
    expect(statusText(stateOf(ANSWERS.empty))).toBe('No GPU');
    expect(statusText(stateOf(NO_ANSWER))).toBe('GPU: no data');
    expect(statusText({ kind: 'off' })).toBe('');
  });

  it('is coloured only when it wants attention', () => {
    const ready = stateOf(ANSWERS.active);
    expect((['active', 'idle', 'asleep'] as const).map(phase => wantsAttention(ready, phase))).toEqual([
      false,
      false,
      false
    ]);
    expect(wantsAttention(ready, 'warned')).toBe(true);
    expect(wantsAttention(ready, 'lost')).toBe(true);
    expect(wantsAttention(stateOf(NO_ANSWER), null)).toBe(true);
  });
});

describe('sentences', () => {
  it('are the broker’s own where it has one', () => {
    expect(sentence(stateOf(ANSWERS.asleep))).toBe(ANSWERS.asleep.leases[0]!.sentence);
  });

  it('say since when the broker is silent', () => {
    expect(sentence(stateOf(NO_ANSWER))).toMatch(
      /^No news from the GPU broker since .*\d\d.*\. Your kernel keeps running\.$/
    );
  });

  it('say when it is the server that does not answer', () => {
    const state = { kind: 'unreachable', since: new Date(0), source: 'server' } as const;
    expect(sentence(state)).toMatch(/^No answer from your server since .*\d\d/);
  });

  it('say how long the GPU took to come back', () => {
    const lease = ANSWERS.active.leases[0]!;
    expect(noticeText({ kind: 'back', lease, seconds: 7.2 })).toBe(
      'Your GPU is back after 7 s. Nothing was lost.'
    );
    expect(noticeText({ kind: 'back', lease, seconds: null })).toBe(
      'Your GPU is back. Nothing was lost.'
    );
    const poorer = { ...lease, saved_lost: true };
    expect(noticeText({ kind: 'back', lease: poorer, seconds: 7.2 })).toBe(
      'Your GPU is back. Some of its memory was lost meanwhile: see What happened.'
    );
  });

  it('say what a meter shows', () => {
    expect(memoryText(ANSWERS.active.leases[0]!)).toBe('6.8 of 40 GiB');
    expect(memoryText(ANSWERS.asleep.leases[0]!)).toBe('6.8 GiB in RAM');
    expect(projectText(ANSWERS.active.projects[0]!)).toBe(
      '1 guaranteed, 1.5 in use, 1 borrowed, 1 job waiting'
    );
  });

  it('say the state of a job', () => {
    expect(ANSWERS.active.jobs.map(job => jobBadge(job))).toEqual([
      'Running',
      'Queued, number 3',
      'Failed'
    ]);
  });

  it('say what a week was', () => {
    expect(weekText(HISTORY)).toBe(
      'You used 14 GPU-hours. Your idle time gave 6.4 GPU-hours to others; 3 of them had waited for your GPU.'
    );
    expect(weekText({ ...HISTORY, helped_jobs: 0 })).toMatch(/gave 6\.4 GPU-hours to others\.$/);
    expect(weekText({ ...HISTORY, lent_gpu_s: 0 })).toBe('You used 14 GPU-hours.');
    const little = { ...HISTORY, used_gpu_s: 719, lent_gpu_s: 1, helped_jobs: 0 };
    expect(weekText(little)).toBe(
      'You used 11 GPU-minutes. Your idle time gave less than 1 GPU-minute to others.'
    );
    expect(weekText({ ...HISTORY, used_gpu_s: 60, lent_gpu_s: 0 })).toBe('You used 1 GPU-minute.');
  });

  it('say what each day of a week was', () => {
    const text = daysText(daysOf(HISTORY, '2031-05-06T14:02:12Z'));
    expect(text).toMatch(/^GPU-hours a day\. .*: 12 used, 4\.0 given to others; .*: 2\.0 used, 2\.4 given to others\.$/);
    expect(text.match(/: 0 used, 0 given to others/g)).toHaveLength(5);
  });

  it('copy nothing where nothing is held', () => {
    const empty = { ...ANSWERS.waking.leases[0]!, memory_saved_bytes: 0, memory_used_bytes: 0 };
    expect(wakingSteps(empty, 4)).toBe('Getting the GPU back, 4 s so far.');
    expect(noticeText({ kind: 'warned', lease: { ...empty, lend_in_s: 30 } })).toBe(
      'Your GPU is lent in 30 s: others wait. It comes back with your next GPU cell.'
    );
  });

  it('count both steps of waking', () => {
    const lease = ANSWERS.waking.leases[0]!;
    expect(wakingSteps({ ...lease, state: 'suspended' }, 2.9)).toBe(
      'Waking up: step 1 of 2, getting the GPU back, 2 s so far.'
    );
    expect(wakingSteps({ ...lease, state: 'resuming', memory_saved_bytes: 6.8 * 2 ** 30 }, 4)).toBe(
      'Waking up: step 2 of 2, copying 6.8 GiB back, 4 s so far.'
    );
  });
});
