import { describe, expect, it } from 'vitest';

import { Observer, Sight } from '../src/sight';
import type { GpuState } from '../src/state';

const STATE: GpuState = { kind: 'loading' };
const SILENT: GpuState = { kind: 'unreachable', since: new Date(0), source: 'broker' };

/** Returns places; the test brings their elements into sight. */
function build(): {
  sight: Sight;
  node: (name: string) => Element;
  see: (name: string, isSeen?: boolean, width?: number) => void;
  observed: Set<Element>;
} {
  const observed = new Set<Element>();
  let follow: Parameters<ConstructorParameters<typeof Sight>[0] & object>[0] = () => undefined;
  const sight = new Sight(seen => {
    follow = seen;
    const observer: Observer = {
      observe: node => void observed.add(node),
      unobserve: node => void observed.delete(node)
    };
    return observer;
  });
  const nodes = new Map<string, Element>();
  const node = (name: string): Element => {
    nodes.set(name, nodes.get(name) ?? ({ name } as unknown as Element));
    return nodes.get(name)!;
  };
  const see = (name: string, isSeen = true, width = 100): void =>
    follow([{ target: node(name), isIntersecting: isSeen, intersectionRect: { width, height: 20 } as DOMRect }]);
  return { sight, node, see, observed };
}

const always = (): boolean => true;

describe('a message', () => {
  it('is shown in the most specific place that is in sight', () => {
    const { sight, node, see } = build();
    const sidebar = sight.add('sidebar', node('sidebar'), always);
    const banner = sight.add('banner', node('notebook'), always);
    const cell = sight.add('cell', node('cell'), always);
    expect(sight.of(STATE)).toBeNull();
    see('sidebar');
    expect(sight.of(STATE)).toBe(sidebar);
    see('notebook');
    expect(sight.of(STATE)).toBe(banner);
    see('cell');
    expect(sight.of(STATE)).toBe(cell);
    see('cell', false);
    expect(sight.of(STATE)).toBe(banner);
  });

  it('is not shown where an element has no area', () => {
    const { sight, node, see } = build();
    sight.add('sidebar', node('sidebar'), always);
    see('sidebar', true, 0);
    expect(sight.of(STATE)).toBeNull();
  });

  it('is left to places that show it in this state', () => {
    const { sight, node, see } = build();
    const sidebar = sight.add('sidebar', node('sidebar'), always);
    const jobs = sight.add('jobs', node('jobs'), ({ kind }) => kind === 'unreachable');
    see('sidebar');
    see('jobs');
    expect(sight.of(STATE)).toBe(sidebar);
    expect(sight.of(SILENT)).toBe(jobs);
  });

  it('stays in a notebook while it is in sight beside another', () => {
    const { sight, node, see } = build();
    const first = sight.add('banner', node('a'), always);
    const second = sight.add('banner', node('b'), always);
    see('b');
    expect(sight.of(STATE)).toBe(second);
    see('a');
    expect(sight.of(STATE)).toBe(second);
    see('b', false);
    expect(sight.of(STATE)).toBe(first);
  });

  it('moves on when its place is disposed of, and nothing of that is kept', () => {
    const { sight, node, see, observed } = build();
    const sidebar = sight.add('sidebar', node('sidebar'), always);
    const banner = sight.add('banner', node('notebook'), always);
    see('sidebar');
    see('notebook');
    let changes = 0;
    sight.changed.connect(() => (changes += 1));
    banner.dispose();
    banner.dispose();
    expect(changes).toBe(1);
    expect(sight.of(STATE)).toBe(sidebar);
    expect([...observed]).toEqual([node('sidebar')]);
  });
});
