/**
 * Shows a message in one place: in the most specific one that is in sight.
 *
 * From the most to the least specific: a waiting cell, the banner above a notebook, the
 * list of jobs, the sidebar.  Where none of them is in sight, a notification or the
 * tooltip of the status bar shows it.
 */

import { ISignal, Signal } from '@lumino/signaling';

const RANKS = { cell: 0, banner: 1, jobs: 2, sidebar: 3 } as const;

/** A place where a message can be shown; dispose of it with its element. */
export interface IPlace {
  readonly kind: keyof typeof RANKS;
  /** The element that has to be in sight. */
  readonly node: Element;
  /** Whether it shows the message as it is now at all. */
  readonly says: () => boolean;
  readonly dispose: () => void;
}

/** Decides which of the places of one message shows it. */
export class Sight {
  /** Emitted when other places are in sight. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Adds a place. */
  add(kind: IPlace['kind'], node: Element, says: IPlace['says']): IPlace {
    const place: IPlace = { kind, node, says, dispose: () => this._remove(place) };
    this._places.add(place);
    this._observer.observe(node);
    return place;
  }

  /** Returns the place that shows the message; null: none of them. */
  place(): IPlace | null {
    const able = [...this._places].filter(place => this._inSight.has(place.node) && place.says());
    const best = Math.min(...able.map(({ kind }) => RANKS[kind]));
    const equal = able.filter(({ kind }) => RANKS[kind] === best);
    // It stays where it is: two notebooks side by side do not hand it to and fro.
    const stays = equal.find(place => place === this._last) ?? equal[0] ?? null;
    return (this._last = stays);
  }

  private _follow(seen: readonly IntersectionObserverEntry[]): void {
    for (const { target, isIntersecting, intersectionRect } of seen) {
      if (isIntersecting && intersectionRect.width > 0 && intersectionRect.height > 0) {
        this._inSight.add(target);
      } else {
        this._inSight.delete(target);
      }
    }
    this._changed.emit();
  }

  private _remove(place: IPlace): void {
    if (this._places.delete(place)) {
      this._observer.unobserve(place.node);
      if (this._inSight.delete(place.node)) {
        this._changed.emit();
      }
    }
  }

  private readonly _changed = new Signal<this, void>(this);
  private readonly _observer = new IntersectionObserver(seen => this._follow(seen));
  private readonly _places = new Set<IPlace>();
  private readonly _inSight = new Set<Element>();
  private _last: IPlace | null = null;
}
