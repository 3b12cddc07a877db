/** A button that never drops the keyboard's focus. */

import React from 'react';

interface IButtonProps {
  readonly className: string;
  /** Nothing happens at a click; it can still be reached. */
  readonly off?: boolean;
  readonly run: () => void;
  readonly title?: string;
  readonly 'aria-label'?: string;
  readonly 'aria-expanded'?: boolean;
  readonly children: React.ReactNode;
}

/** Returns whether what a button began is still under way, and the function that begins it. */
export function useBusy(): [boolean, (action: () => Promise<void>) => void] {
  const [busy, setBusy] = React.useState(false);
  const begin = async (action: () => Promise<void>): Promise<void> => {
    setBusy(true);
    await action();
    setBusy(false);
  };
  return [busy, action => void begin(action)];
}

/** A browser takes the focus from a disabled button, and from one that goes: the area around it gets it then. */
export function Button(props: IButtonProps): JSX.Element {
  const { off = false, run, ...more } = props;
  const button = React.useRef<HTMLButtonElement>(null);
  React.useLayoutEffect(() => {
    const mine = button.current!;
    return () => {
      if (mine === document.activeElement) {
        mine.closest<HTMLElement>('[tabindex="-1"]')?.focus();
      }
    };
  }, []);
  return <button {...more} ref={button} type="button" aria-disabled={off} onClick={() => off || run()} />;
}
