/** A button that never loses the keyboard focus. */

import React from 'react';

interface IButtonProps {
  readonly className: string;
  /** A click does nothing, but the keyboard still reaches the button. */
  readonly off?: boolean;
  readonly run: () => void;
  readonly title?: string;
  readonly 'aria-label'?: string;
  readonly 'aria-expanded'?: boolean;
  readonly children: React.ReactNode;
}

/** Returns whether a button's action is running, and the function that starts one. */
export function useBusy(): [boolean, (action: () => Promise<void>) => void] {
  const [busy, setBusy] = React.useState(false);
  const begin = async (action: () => Promise<void>): Promise<void> => {
    setBusy(true);
    await action();
    setBusy(false);
  };
  return [busy, action => void begin(action)];
}

/** Browsers drop the focus of a disabled or removed button: this one keeps it while off, and passes it on. */
export function Button(props: IButtonProps): JSX.Element {
  const { off = false, run, ...more } = props;
  const button = React.useRef<HTMLButtonElement>(null);
  React.useLayoutEffect(() => {
    const node = button.current!;
    return () => {
      if (node === document.activeElement) {
        node.closest<HTMLElement>('[tabindex="-1"]')?.focus();
      }
    };
  }, []);
  return <button {...more} ref={button} type="button" aria-disabled={off} onClick={() => off || run()} />;
}
