// SPDX-License-Identifier: AGPL-3.0-only
// E2B's code interpreter package for JavaScript. Prints results as JSON.
import assert from 'node:assert/strict'
import { Sandbox } from '@e2b/code-interpreter'

const passed = []
const failed = {}
const sandbox = await Sandbox.create({ timeoutMs: 300_000 })

const tour = {
  async codeKeepsItsState() {
    await sandbox.runCode('x = 41')
    assert.equal((await sandbox.runCode('x += 1\nx')).text, '42')
  },
  async outputAndErrors() {
    const lines = []
    const execution = await sandbox.runCode("print('hi')\n1 / 0", {
      onStdout: (message) => lines.push(message.line),
    })
    assert.equal(lines.join(''), 'hi\n')
    assert.equal(execution.error.name, 'ZeroDivisionError')
  },
  async contextsAndLanguages() {
    const context = await sandbox.createCodeContext({ language: 'javascript', cwd: '/tmp' })
    assert.equal((await sandbox.runCode('Deno.cwd()', { context })).text, '/tmp')
    assert.ok((await sandbox.listCodeContexts()).some((one) => one.id === context.id))
    await sandbox.removeCodeContext(context)
  },
}
try {
  for (const [name, work] of Object.entries(tour)) {
    try {
      await work()
      passed.push(name)
    } catch (error) {
      failed[name] = String(error?.stack ?? error)
    }
  }
} finally {
  await sandbox.kill()
}
console.log(JSON.stringify({ passed, failed }))
