/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the fields of aiflame.agent.python.layouts.Layout as CPython's own headers have them. */
#define Py_BUILD_CORE 1
#include <Python.h>
#include <frameobject.h>
#include <stddef.h>
#include <stdio.h>
#if PY_VERSION_HEX >= 0x03090000
#include "internal/pycore_interp.h"
#include "internal/pycore_runtime.h"
#else
#include "internal/pycore_pystate.h"
#endif
#if PY_VERSION_HEX >= 0x030b0000
#include "internal/pycore_frame.h"
#include "internal/pycore_gil.h"
typedef _PyInterpreterFrame Frame;
#else
typedef PyFrameObject Frame;
#endif

#define SHOW(name, value) printf("%s %zu\n", name, (size_t)(value))
#define AT(name, type, field) SHOW(name, offsetof(type, field))

static void show_frame(void)
{
#if PY_VERSION_HEX >= 0x030d0000
	AT("thread_frame", PyThreadState, current_frame);
	AT("frame_code", Frame, f_executable);
	AT("frame_position", Frame, instr_ptr);
#elif PY_VERSION_HEX >= 0x030b0000
	AT("thread_frame", PyThreadState, cframe);
	AT("cframe_frame", _PyCFrame, current_frame);
	AT("frame_code", Frame, f_code);
	AT("frame_position", Frame, prev_instr);
#else
	AT("thread_frame", PyThreadState, frame);
	AT("frame_code", Frame, f_code);
	AT("frame_position", Frame, f_lasti);
#endif
#if PY_VERSION_HEX >= 0x030c0000
	AT("frame_mark", Frame, owner);
	AT("frame_previous", Frame, previous);
#elif PY_VERSION_HEX >= 0x030b0000
	AT("frame_mark", Frame, is_entry);
	AT("frame_previous", Frame, previous);
#else
	AT("frame_previous", Frame, f_back);
#endif
#if defined(Py_GIL_DISABLED) && PY_VERSION_HEX >= 0x030e0000
	AT("frame_copy", Frame, tlbc_index);
#endif
}

static void show_state(void)
{
	AT("runtime_interpreters", _PyRuntimeState, interpreters.head);
	_Static_assert(offsetof(_PyRuntimeState, interpreters.main) ==
			       offsetof(_PyRuntimeState, interpreters.head) + 8,
		       "the main interpreter follows the head of the list");
	AT("interpreter_next", PyInterpreterState, next);
	AT("thread_next", PyThreadState, next);
	AT("thread_interpreter", PyThreadState, interp);
	AT("thread_id", PyThreadState, thread_id);
#if PY_VERSION_HEX >= 0x030b0000
	AT("thread_native_id", PyThreadState, native_thread_id);
	AT("interpreter_threads", PyInterpreterState, threads.head);
#else
	AT("interpreter_threads", PyInterpreterState, tstate_head);
#endif
#if PY_VERSION_HEX >= 0x030c0000
#if PY_VERSION_HEX < 0x030f0000
	AT("runtime_tss_key", _PyRuntimeState, autoTSSkey._key);
#endif
	AT("interpreter_modules", PyInterpreterState, imports.modules);
	AT("gil", PyInterpreterState, ceval.gil);
	AT("gil_last_holder", struct _gil_runtime_state, last_holder);
	AT("gil_locked", struct _gil_runtime_state, locked);
	AT("thread_status", PyThreadState, _status);
#else
	AT("interpreter_modules", PyInterpreterState, modules);
	AT("runtime_tss_key", _PyRuntimeState, gilstate.autoTSSkey._key);
	AT("gil", _PyRuntimeState, gilstate.tstate_current);
#endif
}

static void show_objects(void)
{
	AT("code_first_line", PyCodeObject, co_firstlineno);
	AT("code_filename", PyCodeObject, co_filename);
	AT("code_name", PyCodeObject, co_name);
#if PY_VERSION_HEX >= 0x030b0000
	AT("code_qualname", PyCodeObject, co_qualname);
	AT("code_instructions", PyCodeObject, co_code_adaptive);
#else
	AT("code_instructions", PyCodeObject, co_code);
#endif
#if defined(Py_GIL_DISABLED) && PY_VERSION_HEX >= 0x030e0000
	AT("code_copies", PyCodeObject, co_tlbc);
	_Static_assert(offsetof(_PyCodeArray, entries) == 8, "copies follow their number");
#endif
#if PY_VERSION_HEX >= 0x030a0000
	AT("code_line_table", PyCodeObject, co_linetable);
#else
	AT("code_line_table", PyCodeObject, co_lnotab);
#endif
	AT("str_length", PyASCIIObject, length);
	AT("str_state", PyASCIIObject, state);
	SHOW("str_ascii_data", sizeof(PyASCIIObject));
	SHOW("str_compact_data", sizeof(PyCompactUnicodeObject));
	AT("bytes_length", PyBytesObject, ob_base.ob_size);
	AT("bytes_data", PyBytesObject, ob_sval);
}

int main(void)
{
	show_state();
	show_frame();
	show_objects();
	return 0;
}
