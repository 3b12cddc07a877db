import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: { include: ['test/*.test.ts'], environment: 'node', pool: 'threads', poolOptions: { threads: { maxThreads: 1 } } }
});
