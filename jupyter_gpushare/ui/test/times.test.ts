import { describe, expect, it } from 'vitest';

import { durationOf, secondsOf } from '../src/times';

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
