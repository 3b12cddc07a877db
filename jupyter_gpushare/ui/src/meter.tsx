/** Bars and a line as plain elements: small, in the theme's colours, with text for screen readers. */

import React from 'react';

import { ISample, points } from './samples';

export function Meter(props: {
  label: string;
  text: string;
  max: number;
  parts: readonly { value: number; kind: string }[];
  /** Value at which a line crosses the bar. */
  mark?: number;
}): JSX.Element {
  const max = props.max > 0 ? props.max : 1;
  const total = props.parts.reduce((sum, part) => sum + part.value, 0);
  return (
    <div
      className="gpushare-meter"
      role="meter"
      aria-label={props.label}
      aria-valuemin={0}
      aria-valuemax={max}
      aria-valuenow={Math.min(total, max)}
      aria-valuetext={props.text}
    >
      {props.parts.map(part => (
        <span
          key={part.kind}
          data-kind={part.kind}
          style={{ width: `${Math.min(100, (100 * part.value) / max)}%` }}
        />
      ))}
      {props.mark !== undefined && props.mark > 0 && props.mark < max && (
        <span className="gpushare-mark" style={{ left: `${(100 * props.mark) / max}%` }} />
      )}
    </div>
  );
}

const WIDTH = 240;
const HEIGHT = 36;

/** Ten minutes as a line; `text` describes it for screen readers. */
export function Sparkline(props: { samples: readonly ISample[]; text: string }): JSX.Element {
  return (
    <svg
      className="gpushare-sparkline"
      viewBox={`0 -1 ${WIDTH} ${HEIGHT + 2}`}
      preserveAspectRatio="none"
      role="img"
      aria-label={props.text}
    >
      <polyline points={points(props.samples, WIDTH, HEIGHT)} />
    </svg>
  );
}
