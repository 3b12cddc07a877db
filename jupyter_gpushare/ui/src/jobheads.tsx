/** The column headers of the list of jobs: a click sorts by a column, another one the other way round. */

import React from 'react';

import { Column, IView } from './jobs';
import { trans } from './translate';

export function Heads(props: {
  view: IView;
  change: (view: IView) => void;
}): JSX.Element {
  const { view, change } = props;
  const columns: [Column, string][] = [
    ['name', trans.__('Job')],
    ['state', trans.__('State')],
    ['size', trans.__('Size')],
    ['waited', trans.__('Waited')],
    ['ran', trans.__('Ran')],
    ['progress', trans.__('Progress')]
  ];
  return (
    <>
      {columns.map(([column, text]) => {
        const mine = view.column === column;
        return (
          <span
            key={column}
            role="columnheader"
            aria-sort={mine ? (view.descending ? 'descending' : 'ascending') : 'none'}
          >
            <button
              type="button"
              onClick={() => change({ ...view, column, descending: mine && !view.descending })}
            >
              {text}
              {mine ? (view.descending ? ' \u25be' : ' \u25b4') : ''}
            </button>
          </span>
        );
      })}
    </>
  );
}
