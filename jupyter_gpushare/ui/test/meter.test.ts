import { describe, expect, it } from 'vitest';

import { Meter } from '../src/meter';

describe('a meter', () => {
  it.each([
    [0.25, 0.5, '50%'],
    [3, 4, '75%'],
    [0, 0, '0%'],
    [2, 1, '100%']
  ])('of %d of %d is %s wide', (value, max, width) => {
    const { props } = Meter({ label: '', text: '', max, parts: [{ value, kind: 'used' }] });
    expect(props.children[0][0].props.style.width).toBe(width);
    expect(props['aria-valuenow']).toBeLessThanOrEqual(props['aria-valuemax']);
  });
});
