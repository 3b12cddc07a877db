import { describe, expect, it, vi } from 'vitest';

// Its widgets need a browser; nothing is shown here.
const shown = vi.hoisted(() => ({ texts: [] as string[], undo: (): void => undefined }));
vi.mock('@jupyterlab/apputils', () => ({
  Notification: {
    success: (text: string, { actions }: { actions: { callback: () => void }[] }) => {
      shown.texts.push(text);
      shown.undo = actions[0]!.callback;
    }
  }
}));

import { Actions } from '../src/actions';
import { GpuModel } from '../src/model';
import { ANSWERS } from './answers';
import './trans';

function actionsOf(model: object, keepMinutes: number): Actions {
  const options = { keepMinutes, toasts: true, banner: true };
  return new Actions({ model: model as GpuModel, options: () => options });
}

function keep(left: number | null, chosen = 30): { label: string; minutes: Promise<number> } {
  const lease = { ...ANSWERS.active.leases[0]!, keep_left_minutes: left };
  let minutes = 0;
  const model = { lease, change: async (_: string, asked: number) => (minutes = asked) };
  const action = actionsOf(model, chosen).keep();
  return { label: action.label, minutes: action.run().then(() => minutes) };
}

describe('keeping a GPU', () => {
  it('asks for what was chosen, and for no more than the day has left', async () => {
    expect(keep(90).label).toBe('Keep it 30 min');
    expect(await keep(90).minutes).toBe(30);
    expect(keep(15.9).label).toBe('Keep it 15 min');
    expect(await keep(15.9).minutes).toBe(15);
    expect(keep(null).label).toBe('Keep it 30 min');
  });

  it('lets the broker refuse where nothing is left', async () => {
    expect(await keep(0.5).minutes).toBe(30);
  });

  it('gives a receipt, with a way back', async () => {
    const lease = { ...ANSWERS.active.leases[0]!, keep_until: '2031-05-06T14:50:00Z', keep_left_minutes: 90 };
    const asked: number[] = [];
    const model = { lease, change: async (_: string, minutes: number) => void asked.push(minutes) };
    await actionsOf(model, 30).keep().run();
    expect(shown.texts.slice(-1)[0]).toMatch(/^Your GPU stays with you until .*\. 90 min of that are left today\.$/);
    shown.undo();
    expect(asked).toEqual([30, 0]);
  });
});
