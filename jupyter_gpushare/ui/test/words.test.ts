import type { TranslationBundle } from '@jupyterlab/translation';
import { describe, expect, it } from 'vitest';

import { stateOf } from '../src/model';
import {
  duration,
  gigabytes,
  jobBadge,
  memoryText,
  noticeText,
  projectText,
  sentence,
  statusText,
  wantsAttention
} from '../src/words';
import { ANSWERS, SILENT } from './answers';

/** English, as JupyterLab's own null translator has it. */
const trans = {
  __: (text: string, ...args: unknown[]) => fill(text, args),
  _n: (one: string, many: string, n: number, ...args: unknown[]) => fill(n === 1 ? one : many, [n, ...args])
} as unknown as TranslationBundle;

function fill(text: string, args: unknown[]): string {
  return text.replace(/%(\d)/g, (_, index: string) => String(args[Number(index) - 1]));
}

describe('sizes and times', () => {
  it('has one digit below ten gigabytes and none above', () => {
    expect([0, 6.8, 9.94, 9.96, 40, 160].map(size => gigabytes(size * 2 ** 30))).toEqual([
      '0',
      '6.8',
      '9.9',
      '10',
      '40',
      '160'
    ]);
  });

  it('has one unit', () => {
    expect([0, 89, 90, 5399, 5400].map(seconds => duration(trans, seconds))).toEqual([
      '0 s',
      '89 s',
      '2 min',
      '90 min',
      '2 h'
    ]);
  });
});

describe('status bar', () => {
  it('says size, memory and badge', () => {
    expect(statusText(trans, stateOf(ANSWERS.active))).toBe('1/2 GPU 6.8/40 GB Active');
    expect(statusText(trans, stateOf(ANSWERS.asleep))).toBe('1/2 GPU 0/40 GB Asleep, GPU lent');
    expect(statusText(trans, stateOf(ANSWERS.empty))).toBe('No GPU');
    expect(statusText(trans, stateOf(SILENT))).toBe('GPU: no data');
    expect(statusText(trans, { kind: 'off' })).toBe('');
  });

  it('is coloured only when it wants attention', () => {
    const ready = stateOf(ANSWERS.active);
    expect((['active', 'idle', 'asleep'] as const).map(phase => wantsAttention(ready, phase))).toEqual([
      false,
      false,
      false
    ]);
    expect(wantsAttention(ready, 'warned')).toBe(true);
    expect(wantsAttention(stateOf(SILENT), null)).toBe(true);
  });
});

describe('sentences', () => {
  it('are the broker’s own where it has one', () => {
    expect(sentence(trans, stateOf(ANSWERS.asleep))).toBe(ANSWERS.asleep.leases[0]!.sentence);
  });

  it('say since when the broker is silent', () => {
    expect(sentence(trans, stateOf(SILENT))).toMatch(
      /^No news from the GPU broker since .*\d\d.*\. Your kernel keeps running\.$/
    );
  });

  it('say how long the GPU took to come back', () => {
    const lease = ANSWERS.active.leases[0]!;
    expect(noticeText(trans, { kind: 'back', lease, seconds: 7.2 })).toBe(
      'Your GPU is back after 7 s. Nothing was lost.'
    );
    expect(noticeText(trans, { kind: 'back', lease, seconds: null })).toBe(
      'Your GPU is back. Nothing was lost.'
    );
  });

  it('say what a meter shows', () => {
    expect(memoryText(trans, ANSWERS.active.leases[0]!)).toBe('6.8 of 40 GB');
    expect(memoryText(trans, ANSWERS.asleep.leases[0]!)).toBe('6.8 GB kept in RAM');
    expect(projectText(trans, ANSWERS.active.projects[0]!)).toBe(
      '1.5 in use, 1 guaranteed, 1 borrowed, 1 job waiting'
    );
  });

  it('say the state of a job', () => {
    expect(ANSWERS.active.jobs.map(job => jobBadge(trans, job))).toEqual([
      'Running',
      'Queued, number 3',
      'Failed'
    ]);
  });
});
