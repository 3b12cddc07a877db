import { describe, expect, it } from 'vitest';

import { daysOf } from '../src/days';
import { HISTORY } from './answers';

describe('a week by day', () => {
  it('ends with the day of the broker, and has days without use', () => {
    const days = daysOf(HISTORY, '2031-05-06T14:02:12Z');
    expect(days.map(({ day }) => day)).toEqual([
      '2031-04-30',
      '2031-05-01',
      '2031-05-02',
      '2031-05-03',
      '2031-05-04',
      '2031-05-05',
      '2031-05-06'
    ]);
    expect(days.slice(4)).toEqual([
      { day: '2031-05-04', usedGpuS: 0, lentGpuS: 0 },
      { day: '2031-05-05', usedGpuS: 43200, lentGpuS: 14400 },
      { day: '2031-05-06', usedGpuS: 7200, lentGpuS: 8640 }
    ]);
  });

  it('takes all projects together', () => {
    const more = { day: '2031-05-05', project: 'nlp', used_gpu_s: 3600, lent_gpu_s: 60, saved_gib_s: 0 };
    const days = daysOf({ ...HISTORY, days: [more, ...HISTORY.days] }, '2031-05-06T00:00:00Z');
    expect(days[5]).toEqual({ day: '2031-05-05', usedGpuS: 46800, lentGpuS: 14460 });
  });

  it('leaves out what is older', () => {
    const days = daysOf(HISTORY, '2031-05-12T00:00:00Z');
    expect(days[0]).toEqual({ day: '2031-05-06', usedGpuS: 7200, lentGpuS: 8640 });
    expect(days.slice(1).every(day => day.usedGpuS === 0 && day.lentGpuS === 0)).toBe(true);
  });
});
