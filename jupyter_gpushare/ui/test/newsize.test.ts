import { describe, expect, it } from 'vitest';

import { sizeOf } from '../src/newsize';

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
