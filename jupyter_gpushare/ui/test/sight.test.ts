import { describe, expect, it, vi } from 'vitest';

import { Sight } from '../src/sight';

/** Returns places; the test brings their elements into sight. */
function build(): {
  sight: Sight;
  node: (name: string) => Element;
  see: (name: string, isSeen?: boolean, width?: number) => void;
  observed: Set<Element>;
} {
  const observed = new Set<Element>();
  let follow: (seen: object[]) => void = () => undefined;
  class Observer {
    constructor(seen: typeof follow) {
      follow = seen;
    }
    readonly observe = (node: Element): void => void observed.add(node);
    readonly unobserve = (node: Element): void => void observed.delete(node);
  }
  vi.stubGlobal('IntersectionObserver', Observer);
  const sight = new Sight();
  const nodes = new Map<string, Element>();
  const node = (name: string): Element => {
    nodes.set(name, nodes.get(name) ?? ({ name } as unknown as Element));
    return nodes.get(name)!;
  };
  const see = (name: string, isSeen = true, width = 100): void =>
    follow([{ target: node(name), isIntersecting: isSeen, intersectionRect: { width, height: 20 } }]);
  return { sight, node, see, observed };
}

const always = (): boolean => true;

describe('a message', () => {
  it('is shown in the most specific place that is in sight', () => {
    const { sight, node, see } = build();
    const sidebar = sight.add('sidebar', node('sidebar'), always);
    const banner = sight.add('banner', node('notebook'), always);
    const cell = sight.add('cell', node('cell'), always);
    expect(sight.place()).toBeNull();
    see('sidebar');
    expect(sight.place()).toBe(sidebar);
    see('notebook');
    expect(sight.place()).toBe(banner);
    see('cell');
    expect(sight.place()).toBe(cell);
    see('cell', false);
    expect(sight.place()).toBe(banner);
  });

  it('is not shown where an element has no area', () => {
    const { sight, node, see } = build();
    sight.add('sidebar', node('sidebar'), always);
    see('sidebar', true, 0);
    expect(sight.place()).toBeNull();
  });

  it('is left to places that show it in this state', () => {
    const { sight, node, see } = build();
    const sidebar = sight.add('sidebar', node('sidebar'), always);
    let silent = false;
    const jobs = sight.add('jobs', node('jobs'), () => silent);
    see('sidebar');
    see('jobs');
    expect(sight.place()).toBe(sidebar);
    silent = true;
    expect(sight.place()).toBe(jobs);
  });

  it('stays in a notebook while it is in sight beside another', () => {
    const { sight, node, see } = build();
    const first = sight.add('banner', node('a'), always);
    const second = sight.add('banner', node('b'), always);
    see('b');
    expect(sight.place()).toBe(second);
    see('a');
    expect(sight.place()).toBe(second);
    see('b', false);
    expect(sight.place()).toBe(first);
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
    expect(sight.place()).toBe(sidebar);
    expect([...observed]).toEqual([node('sidebar')]);
  });
});
