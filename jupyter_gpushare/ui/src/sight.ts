/**
 * Shows a message in one place: the most specific one in sight.
 *
 * From the most to the least specific, the places are a waiting cell, the banner above a notebook,
 * the list of jobs and the sidebar.  If none is in sight, a notification or the tooltip of the
 * status bar shows the message.
 */

import { ISignal, Signal } from '@lumino/signaling';

const RANKS = { cell: 0, banner: 1, jobs: 2, sidebar: 3 } as const;

/** A place that can show a message; dispose of it together with its element. */
export interface IPlace {
  readonly kind: keyof typeof RANKS;
  /** The element that must be in sight. */
  readonly node: Element;
  /** Returns whether the place would show the message now. */
  readonly shows: () => boolean;
  readonly dispose: () => void;
}

/** Decides which place shows a message. */
export class Sight {
  /** Emitted when the places in sight change. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Adds a place. */
  add(kind: IPlace['kind'], node: Element, shows: IPlace['shows']): IPlace {
    const place: IPlace = { kind, node, shows, dispose: () => this._remove(place) };
    this._places.add(place);
    this._observer.observe(node);
    return place;
  }

  /** Returns the place that shows the message; null if none does. */
  place(): IPlace | null {
    const able = [...this._places].filter(place => this._inSight.has(place.node) && place.shows());
    const best = Math.min(...able.map(({ kind }) => RANKS[kind]));
    const equal = able.filter(({ kind }) => RANKS[kind] === best);
    // The last place keeps the message, so that it does not alternate between two notebooks side by side.
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
