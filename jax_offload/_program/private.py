"""Everything that the package needs from jax beyond its documented API, with a loud error where jax has moved it.

| needed | for | seen in jax |
|---|---|---|
| where an equation keeps the jaxprs that it runs | ``jaxprs.inner_of`` | 0.10 to 0.12 |
| which operands of a ``scan`` are constants, carried or rows | ``jaxprs.scan_of`` | 0.10 and 0.11, 0.12 |
| ``dce_jaxpr`` | ``without_dead_code`` | 0.10 to 0.12 |
| ``discharge_state`` | ``without_references`` | 0.10 to 0.12 |
| whether the innermost trace computes values | ``traces`` | 0.10 to 0.12 |
| the tables of a primitive's rules; symbols for zero | ``set_rules``, ``nonzero``, ``zero_tangent`` | 0.10 to 0.12 |
| how jax types and prepares the arguments of a program, by class | ``trace_as``, ``trace_as_on_host`` | 0.10 to 0.12 |
| what ``vmap`` makes of an argument, by class | ``trace_as`` | 0.10 to 0.12 |
| ``lower_fun`` | ``lowered`` | 0.10 to 0.12 |
| ``main`` of a module, with the attributes of its arguments and results | ``take_back_aliases`` | 0.10 to 0.12 |
| a tracer's variable, equation and trace | ``variable_of``, ``equation_of``, ``equations_of_trace`` | 0.10 to 0.12 |
| how the trace of a ``jit`` appends an equation | ``replayed`` | 0.10 to 0.12 |
| ``memory_space`` and ``manual_axis_type`` of a type | ``memory.is_host_aval``, ``manual_axes_of`` | 0.10 to 0.12 |
| XLA's compile options, a list of devices, ``compile`` of a client | ``compiled``, ``options_of`` | 0.10 to 0.12 |
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax._src import core as private_core
from jax._src import dtypes as private_dtypes
from jax._src.interpreters import batching as private_batching
from jax._src.interpreters import partial_eval as private_pe
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.state import discharge
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

ALIAS, DONOR, KIND = "tf.aliasing_output", "jax.buffer_donor", "mhlo.memory_kind"
INFO = "jax.result_info"


def _has_moved(what: str, so: str = "") -> RuntimeError:
    return RuntimeError(
        f"jax {jax.__version__} differs from the versions that jax_offload knows ({what}){so}. Install a jax that "
        "jax_offload supports (see its pyproject.toml), and report this."
    )


def _part_of(x: Any, *names: str) -> Any:
    """``x.a.b`` for the names a and b; ``RuntimeError`` where there is none."""
    for name in names:
        if not hasattr(x, name):
            raise _has_moved(f"no {name!r} in {x.__name__ if hasattr(x, '__name__') else type(x).__name__}")
        x = getattr(x, name)
    return x


def _check_types() -> None:
    """Raise ``RuntimeError`` if the types of arrays lack an attribute that ``is_host_aval`` and others read."""
    scalar = ShapedArray((), jax.numpy.float32)
    for name in ("memory_space", "manual_axis_type", "sharding", "weak_type"):
        _part_of(scalar, name)


_check_types()


def without_dead_code(
    jaxpr: Any, used: Sequence[bool] | None = None, *, keep_inputs: bool = False
) -> tuple[Any, list[bool]]:
    """An open jaxpr with the equations that its results need and those with effects, and which inputs are left.

    Args:
      jaxpr: the jaxpr.
      used: for each result whether it is needed; ``None``: all are.
      keep_inputs: whether inputs stay that nothing needs.
    """
    needed = [True] * len(jaxpr.outvars) if used is None else list(used)
    return _part_of(pe, "dce_jaxpr")(jaxpr, needed, instantiate=keep_inputs)


def traces() -> bool:
    """Whether a program is being traced, or a function transformed, so that calls become parts of it."""
    return not _part_of(private_core, "trace_state_clean")()


def without_references(jaxpr: Any) -> Any:
    """Turn the mutable arrays that live inside a closed jaxpr into values."""
    return _part_of(discharge, "discharge_state")(jaxpr)


def set_rules(
    primitive: jex.Primitive,
    *,
    lower: Callable[..., Any] | None = None,
    lower_for_cpu: Callable[..., Any] | None = None,
    jvp: Callable[..., Any] | None = None,
    batch: Callable[..., Any] | None = None,
    batch_over: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    dce: Callable[..., Any] | None = None,
) -> None:
    """Give a primitive its rules. ``batch_over`` is a ``batch`` that also gets the axis."""
    tables = (
        (ad, "primitive_jvps", jvp),
        (batching, "primitive_batchers", batch),
        (batching, "fancy_primitive_batchers", batch_over),
        (ad, "primitive_transposes", transpose),
        (pe, "dce_rules", dce),
    )
    for module, name, rule in tables:
        if rule is not None:
            _part_of(module, name)[primitive] = rule
    if lower is not None:
        mlir.register_lowering(primitive, lower)
    if lower_for_cpu is not None:
        mlir.register_lowering(primitive, lower_for_cpu, platform="cpu")


def trace_as(kind: type, type_of: Callable[[Any], ShapedArray], refuse: Callable[..., Any]) -> None:
    """Let jax trace objects of a class by their types; ``vmap`` and a program that runs with one call ``refuse``."""
    _part_of(private_core, "pytype_aval_mappings")[kind] = type_of
    _part_of(private_dtypes, "canonicalize_value_handlers")[kind] = refuse

    def element(convert: Any, index: Any, x: Any, axis: Any) -> Any:
        return x if axis is None else refuse(x)

    _part_of(private_batching, "to_elt_handlers")[kind] = element


def trace_as_on_host(kind: type[jax.ShapeDtypeStruct]) -> None:
    """Let jax trace abstract values of a class as values in host memory, whatever their sharding says."""
    rules = _part_of(private_core, "pytype_aval_mappings")
    plain = rules[jax.ShapeDtypeStruct]
    rules[kind] = lambda x: plain(x).update(memory_space=jax.memory.Space.Host)


def nonzero(tangent: Any) -> bool:
    """Whether a tangent is an array: neither a symbol for zero, nor of a type without tangents."""
    return not isinstance(tangent, ad.Zero) and tangent.dtype != jax.dtypes.float0


def zero_tangent(primal: Any) -> Any:
    """The symbol for zero that is a tangent of ``primal``."""
    return ad.Zero(_part_of(jax.typeof(primal), "to_tangent_aval")())


def lowered(fun: Callable[..., Any], context: Any, *operands: Any, several: bool) -> Any:
    """Lower ``fun`` inside a lowering rule; ``several``: it returns a list."""
    return _part_of(mlir, "lower_fun")(fun, multiple_results=several)(context, *operands)


def lowered_as_barrier(values: Sequence[Any]) -> Sequence[Any]:
    """Lower a barrier: no value is available before all are."""
    return stablehlo.OptimizationBarrierOp(list(values)).results


def take_back_aliases(context: Any, default_kind: str) -> None:
    """Leave the pairing of donated arguments to XLA if jax has paired two of different memory kinds.

    Args:
      context: a lowering rule's context; it tells the module, whose entry is called ``main``.
      default_kind: the memory kind of values that have none.
    """
    _check_lowering()
    ir, main = mlir.ir, context.module_context.symbol_table["main"]
    if "arg_attrs" not in main.attributes:  # no arguments
        return
    arguments, results = ([ir.DictAttr(a) for a in main.attributes[name]] for name in ("arg_attrs", "res_attrs"))

    def kind(attributes: Any) -> str:
        return attributes[KIND].value if KIND in attributes else default_kind

    if all(kind(a) == kind(results[a[ALIAS].value]) for a in arguments if ALIAS in a):
        return
    changed = [{named.name: named.attr for named in a} for a in arguments]
    for a in (a for a in changed if ALIAS in a):
        del a[ALIAS]
        a[DONOR] = ir.BoolAttr.get(True)
    main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in changed])


def results_of_main(context: Any) -> list[tuple[str, bool]]:
    """The path of each result of the program that is being lowered, and whether it is in pinned host memory.

    Args:
      context: a lowering rule's context.
    """
    _check_lowering()
    main = context.module_context.symbol_table["main"]
    if "res_attrs" not in main.attributes:
        return []
    results: list[Any] = [mlir.ir.DictAttr(each) for each in main.attributes["res_attrs"]]
    return [(each[INFO].value, KIND in each and each[KIND].value == "pinned_host") for each in results if INFO in each]


@functools.cache
def _check_lowering() -> None:
    """Raise ``RuntimeError`` if jax lowers a function in another way than ``take_back_aliases`` relies on."""
    lower = getattr(mlir, "lower_jaxpr_to_fun", None)
    missing = {ALIAS, DONOR, KIND, INFO} - set(_strings(lower.__code__) if lower is not None else ())
    if missing:
        raise _has_moved(f"no {sorted(missing)} in lower_jaxpr_to_fun", ", so donated host memory could be overwritten")


def _strings(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _strings(constant)


def equation_of(x: Any) -> Any:
    """The equation that made a traced value, as one of a jaxpr.

    ``None`` for an argument, and for values that are not traced into a jaxpr: an array, the tangent of a derivative.
    """
    return _as_equation(x.parent) if is_result(x) else None


def is_result(x: Any) -> bool:
    """Whether ``equation_of`` finds an equation; the equation, which may have thousands of operands, is not built."""
    _check_tracers()
    return isinstance(x, _part_of(pe, "DynamicJaxprTracer")) and _part_of(x, "parent") is not None


def _as_equation(eqn: Any) -> Any:
    operands = [variable_of(x) for x in _part_of(eqn, "in_tracers")]
    return jex.new_jaxpr_eqn(operands, eqn.outvars, eqn.primitive, eqn.params, jex.no_effects)


@functools.cache
def _check_tracers() -> None:
    """Raise ``RuntimeError`` if ``equation_of`` would tell nothing about values that a ``jit`` traces."""
    kinds: list[type] = []  # jax.checking_leaks() raises where a tracer outlives its trace
    jax.make_jaxpr(lambda x: kinds.append(type(jax.lax.neg(x))))(jax.ShapeDtypeStruct((), jax.numpy.float32))
    if not issubclass(kinds[0], _part_of(pe, "DynamicJaxprTracer")):
        raise _has_moved(f"a jit traces with {kinds[0].__name__}")


def equations_of_trace(x: Any) -> list[Any]:
    """All equations so far in the trace that a traced value belongs to."""
    found = [e() if isinstance(e, weakref.ref) else e for e in _part_of(x, "_trace", "frame", "tracing_eqns")]
    return [_as_equation(eqn) for eqn in found if eqn is not None]  # jax keeps no equation that nothing is left of


def replayed(jaxpr: Any, operands: Sequence[Any]) -> list[Any] | None:
    """Append a closed jaxpr's equations unchanged to the trace of a ``jit``, and return their results.

    Return ``None`` in any other trace, for operands of other types and for a jaxpr with effects, because the caller
    must then trace the equations again.
    """
    trace, source = _part_of(private_core, "trace_ctx", "trace"), source_info_util.current()
    tracer, folded = (_part_of(private_pe, name) for name in ("DynamicJaxprTracer", "try_constant_folding"))
    own = isinstance(trace, _part_of(private_pe, "DynamicJaxprTrace")) and any(isinstance(x, tracer) for x in operands)
    if not own or jaxpr.effects or [v.aval for v in jaxpr.jaxpr.invars] != [*map(jax.typeof, operands)]:
        return None
    inputs = [*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars]
    env = {v: trace.to_jaxpr_tracer(x, source) for v, x in zip(inputs, [*jaxpr.consts, *operands], strict=True)}

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [tracer(trace, v.aval, v, source) if isinstance(v, jex.Literal) else env[v] for v in atoms]

    for eqn in jaxpr.jaxpr.eqns:
        where = eqn.source_info.replace(name_stack=source.name_stack + eqn.source_info.name_stack)
        given, types = read(eqn.invars), [v.aval for v in eqn.outvars]
        if (known := folded(eqn.primitive, given, eqn.params, types)) is not None:
            made = [trace.new_const(x, where, aval) for x, aval in zip(known, types, strict=True)]
        else:
            made = trace.emit_eqn(given, types, eqn.primitive, eqn.params, eqn.effects, where, eqn.ctx)
        env.update(zip(eqn.outvars, made, strict=True))
    return read(jaxpr.jaxpr.outvars)


def variable_of(x: Any) -> Any:
    """The variable, or the literal, that a traced value is in the jaxpr of its trace."""
    return _part_of(x, "val")


def manual_axes_of(x: Any) -> Any:
    """The axes over which a value, or values of a type, differ inside ``shard_map``; to be compared only."""
    return getattr(x if isinstance(x, ShapedArray) else jax.typeof(x), "manual_axis_type", None)


# ---- compiling for devices that may only be described


def options_of(traced: Any) -> dict[str, Any]:
    """The ``compiler_options`` of the ``jit`` that a ``jax.stages.Traced`` is from."""
    return dict(_part_of(traced, "_params")["compiler_options_kvs"])


def compiled(module: Any, devices: Sequence[Any], ids: Sequence[int], options: Mapping[str, Any]) -> Any:
    """The executable of a StableHLO module, divided between devices.

    Args:
      module: lowered for their platform.
      devices: of one client, which compiles.
      ids: their numbers in the program.
      options: of XLA.
    """
    config = _part_of(xla_client, "CompileOptions")()
    config.num_replicas, config.num_partitions = 1, len(devices)
    build = config.executable_build_options
    build.num_replicas, build.num_partitions = 1, len(devices)
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    build.device_assignment = _part_of(xla_client, "DeviceAssignment").create(np.array([ids]))
    config.env_option_overrides = list(options.items())
    chosen = _part_of(xla_client, "_xla", "DeviceList")(tuple(devices))
    return devices[0].client.compile(module, chosen, config)
