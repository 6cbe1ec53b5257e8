# SPDX-License-Identifier: Apache-2.0
"""Messages of published protos that no package on PyPI has, made of their field numbers.

Sources: https://github.com/google/pprof/blob/main/proto/profile.proto and api/push/v1/push.proto,
api/types/v1/types.proto of https://github.com/grafana/pyroscope.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int64": _Field.TYPE_INT64,
    "uint64": _Field.TYPE_UINT64,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}

_PPROF = {
    "Profile": "1 *ValueType sample_type, 2 *Sample sample, 3 *Mapping mapping,"
    " 4 *Location location, 5 *Function function, 6 *string string_table, 7 int64 drop_frames,"
    " 8 int64 keep_frames, 9 int64 time_nanos, 10 int64 duration_nanos, 11 ValueType period_type,"
    " 12 int64 period, 13 *int64 comment, 14 int64 default_sample_type",
    "ValueType": "1 int64 type, 2 int64 unit",
    "Sample": "1 *uint64 location_id, 2 *int64 value, 3 *Label label",
    "Label": "1 int64 key, 2 int64 str, 3 int64 num, 4 int64 num_unit",
    "Mapping": "1 uint64 id, 2 uint64 memory_start, 3 uint64 memory_limit, 4 uint64 file_offset,"
    " 5 int64 filename, 6 int64 build_id, 7 bool has_functions, 8 bool has_filenames,"
    " 9 bool has_line_numbers, 10 bool has_inline_frames",
    "Location": "1 uint64 id, 2 uint64 mapping_id, 3 uint64 address, 4 *Line line,"
    " 5 bool is_folded",
    "Line": "1 uint64 function_id, 2 int64 line, 3 int64 column",
    "Function": "1 uint64 id, 2 int64 name, 3 int64 system_name, 4 int64 filename,"
    " 5 int64 start_line",
}
_PUSH = {
    "PushRequest": "1 *RawProfileSeries series",
    "RawProfileSeries": "1 *LabelPair labels, 2 *RawSample samples",
    "RawSample": "1 bytes raw_profile, 2 string ID",
    "LabelPair": "1 string name, 2 string value",
}


def _classes(package: str, messages: dict[str, str]) -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=package, package=package, syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field in fields.split(","):
            number, kind, field_name = field.split()
            added = message.field.add(name=field_name, number=int(number))
            many = kind.startswith("*")
            added.label = _Field.LABEL_REPEATED if many else _Field.LABEL_OPTIONAL
            kind = kind.lstrip("*")
            if kind in _SCALARS:
                added.type = _SCALARS[kind]
            else:
                added.type, added.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{package}.{name}") for name in messages)
    return {one.name: message_factory.GetMessageClass(one) for one in found}


PprofProfile: Any = _classes("perftools.profiles", _PPROF)["Profile"]
PushRequest: Any = _classes("push.v1", _PUSH)["PushRequest"]
