import { describe, expect, it } from 'vitest';

import { durationOf, secondsOf, sizeOf } from '../src/typed';

describe('durations', () => {
  it('are read with their unit, and not without', () => {
    expect(['90 s', '30min', '30m', '1.5 h', ' 2 d '].map(secondsOf)).toEqual([90, 1800, 1800, 5400, 172_800]);
    expect(['4', 'h', '-1 h', '4 weeks', ''].map(secondsOf)).toEqual([null, null, null, null, null]);
  });

  it('are written as they are read', () => {
    expect([90, 1800, 5400, 14_400, 172_800, 0.5].map(durationOf)).toEqual([
      '90 s',
      '30 min',
      '90 min',
      '4 h',
      '2 d',
      '0.5 s'
    ]);
    expect(durationOf(null)).toBe('');
  });
});

describe('a size as typed', () => {
  it.each([
    ['0.5', '0.5'],
    [' 1/4 ', '1/4'],
    ['1', '1']
  ])('%s is a part of the GPU', (text, gpus) => {
    expect(sizeOf(text, false, 'nlp')).toEqual({ gpus, memory: null, borrow: false, project: 'nlp' });
  });

  it('with a unit is memory', () => {
    expect(sizeOf('20 GiB', true, 'nlp')).toEqual({ gpus: null, memory: '20GiB', borrow: true, project: 'nlp' });
  });

  it.each(['', 'half', '-1', '0', '1.5', '1/0'])('%s is none', text => {
    expect(sizeOf(text, false, 'nlp')).toBeNull();
  });
});
