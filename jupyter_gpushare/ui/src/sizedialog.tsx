/** The dialog that makes the GPU part of a running server larger or smaller. */

import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import { Signal } from '@lumino/signaling';
import React from 'react';

import { memory } from './messages';
import { sizeOf } from './newsize';
import { ILeaseStatus, ISizeRequest } from './wire';

type Send = (size: ISizeRequest) => Promise<ILeaseStatus>;

/** Asks for a size and sends it; where the size is fixed while a server runs, says that instead. */
export async function resize(
  lease: ILeaseStatus,
  trans: TranslationBundle,
  hub: (() => void) | null,
  send: Send
): Promise<void> {
  if (!lease.resizable) {
    await explain(lease, trans, hub);
    return;
  }
  const dialog = new ResizeDialog(new Choice(lease, trans, send), trans);
  dialog.addClass('gpushare-launch-dialog');
  await dialog.launch();
  await dialog.sending;
}

async function explain(lease: ILeaseStatus, trans: TranslationBundle, hub: (() => void) | null): Promise<void> {
  const close = Dialog.cancelButton({ label: trans.__('Close') });
  const open = Dialog.okButton({ label: trans.__('Hub control panel') });
  const answer = await showDialog({
    title: trans.__('Change size'),
    body: trans.__(
      'This server has to start anew for another size: stop it, then start it with the size that you need. It has %1. Save your work first: variables are lost.',
      lease.size
    ),
    buttons: hub === null ? [close] : [close, open]
  });
  if (answer.button.accept) {
    hub?.();
  }
}

/** What is chosen in an open dialog, and the refusal of the last try. */
class Choice {
  constructor(
    readonly lease: ILeaseStatus,
    private readonly _trans: TranslationBundle,
    private readonly _send: Send
  ) {}

  readonly changed = new Signal<this, void>(this);
  text = '';
  borrow = false;
  refusal = '';
  busy = false;

  set(change: { text?: string; borrow?: boolean }): void {
    Object.assign(this, change, { refusal: '' });
    this.changed.emit();
  }

  /** Returns the lease with its new size; null: it was refused. */
  async submit(): Promise<ILeaseStatus | null> {
    const size = sizeOf(this.text, this.borrow);
    if (this.busy || size === null) {
      this.refusal = this.busy ? this.refusal : this._trans.__('A part of the GPU like 0.5 or 1/4, or memory like 20GiB');
      this.changed.emit();
      return null;
    }
    this.busy = true;
    this.refusal = '';
    this.changed.emit();
    try {
      return await this._send(size);
    } catch (error) {
      this.refusal = error instanceof Error ? error.message : String(error);
      return null;
    } finally {
      this.busy = false;
      this.changed.emit();
    }
  }
}

class ResizeDialog extends Dialog<void> {
  constructor(
    private readonly _choice: Choice,
    private readonly _trans: TranslationBundle
  ) {
    super({
      title: _trans.__('Change size'),
      body: new ResizeBody(_choice, _trans),
      focusNodeSelector: 'input',
      buttons: [
        Dialog.cancelButton({ label: _trans.__('Cancel') }),
        Dialog.okButton({ label: _trans.__('Change') })
      ]
    });
  }

  /** Until nothing is under way. */
  sending: Promise<unknown> = Promise.resolve();

  /** Closes once the size has changed; a refusal leaves the dialog open. */
  override resolve(index?: number): void {
    if (index === 0) {
      super.resolve(0);
      return;
    }
    this.sending = this._choice.submit().then(lease => {
      if (lease !== null) {
        Notification.success(receipt(this._trans, lease), { autoClose: 10000 });
        super.resolve(1);
      }
    });
  }
}

function receipt(trans: TranslationBundle, lease: ILeaseStatus): string {
  return trans.__(
    'You have %1 now (%2). PyTorch and CuPy see it at once; restart kernels that use JAX or TensorFlow.',
    lease.size,
    memory(trans, lease.memory_limit_bytes)
  );
}

class ResizeBody extends ReactWidget {
  constructor(
    private readonly _choice: Choice,
    private readonly _trans: TranslationBundle
  ) {
    super();
    this.addClass('gpushare-launch');
  }

  protected override render(): JSX.Element {
    return (
      <UseSignal signal={this._choice.changed}>
        {() => <Form choice={this._choice} trans={this._trans} />}
      </UseSignal>
    );
  }
}

function Form({ choice, trans }: { choice: Choice; trans: TranslationBundle }): JSX.Element {
  const { lease, refusal } = choice;
  const [used, limit] = [lease.memory_used_bytes, lease.memory_limit_bytes];
  return (
    <>
      <p>
        {trans.__(
          'This server has %1 (%2) and uses %3. Kernels and their variables stay.',
          lease.size,
          memory(trans, limit),
          memory(trans, used)
        )}
      </p>
      <div className="gpushare-field">
        <label htmlFor="gpushare-resize-size">{trans.__('New size')}</label>
        <input
          type="text"
          className="jp-mod-styled"
          id="gpushare-resize-size"
          value={choice.text}
          placeholder="1/2"
          spellCheck={false}
          autoComplete="off"
          aria-invalid={refusal !== ''}
          aria-describedby="gpushare-resize-hint"
          onChange={({ target: { value } }) => choice.set({ text: value })}
        />
        <span className="gpushare-muted" id="gpushare-resize-hint">
          {trans.__('A part of the GPU like 0.5 or 1/4, or memory like 20GiB')}
        </span>
      </div>
      <div className="gpushare-field gpushare-switch">
        <label>
          <input
            type="checkbox"
            checked={choice.borrow}
            aria-describedby="gpushare-resize-borrow"
            onChange={({ target: { checked } }) => choice.set({ borrow: checked })}
          />
          {trans.__('Also beyond what project %1 is guaranteed', lease.project)}
        </label>
        <span className="gpushare-muted" id="gpushare-resize-borrow">
          {trans.__('This session may then be put to sleep when others need the GPU.')}
        </span>
      </div>
      <div className="gpushare-verdict">
        {refusal !== '' && (
          <p className="gpushare-refusal" role="alert">
            {refusal}
          </p>
        )}
        {choice.busy && <p role="status">{trans.__('Changing.')}</p>}
      </div>
    </>
  );
}
