//! The step's entry: calls of its kernels in order. A comment above each says what it computes.
//! [`super::tree`] has the functions.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use kiln_compiler::plan::{Place, Plan};
use kiln_compiler::report::KernelReport;
use kiln_compiler::schedule::{Kernel, KernelKind};
use kiln_compiler::{Emitted, Step};
use kiln_graph::{Graph, Op};

use super::nest::{Argument, Launch};
use super::tree::{FileGroup, Functions};
use super::{Call, KernelCode, guards::guards, in_comment, own};
use crate::build::SourceFile;
use crate::isa::Isa;
use crate::policy::{FLAT_GRAIN, SERIAL_POINTS};
use crate::runtime::abi::Signature;

/// Writes the tree for a scheduled and planned graph.
pub fn emit<K>(step: &Step<'_, K>, codes: &[KernelCode], isa: Isa) -> Emitted<Vec<SourceFile>> {
    let Step {
        graph,
        schedule,
        plan,
        ..
    } = *step;
    let guards = guards(graph, schedule, step.checks);
    let mut functions = Functions::default();
    let mut body = String::new();
    let mut names = Vec::new();
    let mut externs = 0..;
    let mut own = BTreeMap::new();
    let kernels = schedule.kernels.iter().zip(codes).zip(step.reports);
    for (number, ((kernel, code), report)) in kernels.enumerate() {
        let mut own_name = String::new();
        comment(graph, kernel, plan, report, &mut body);
        let part = FileGroup::of(graph, kernel);
        for call in &code.calls {
            let place = |argument: &Argument| place_text(plan, *argument, plan.scratch[number]);
            let entry = |argument: &Argument| place_entry(plan, *argument, plan.scratch[number]);
            let kind = kernel.kind_name(graph);
            let mut task_name = |text: &str| {
                functions.name(kind, part, text, &[], |name| {
                    format!("void {name}(void *ctx, int64_t begin, int64_t end, int thread);")
                })
            };
            match call {
                Call::Task(launch) => {
                    let name = task_name(&launch.text);
                    let list: Vec<String> = launch.arguments.iter().map(entry).collect();
                    task(&mut body, number, &name, launch, &list);
                    if own_name.is_empty() {
                        own_name = name;
                    }
                }
                Call::Together(task) => {
                    let name = task_name(&task.text);
                    let tensors = task
                        .tensors
                        .iter()
                        .filter(|(_, elements)| *elements > 0)
                        .map(|(arguments, elements)| (arguments.iter().map(entry).collect(), *elements));
                    together(&mut body, number, &name, &tensors.collect::<Vec<_>>());
                    if own_name.is_empty() {
                        own_name = name;
                    }
                }
                Call::Kernel {
                    kernel: template,
                    arguments,
                } => {
                    let kind = template_name(graph, kernel);
                    let called = &template.helpers;
                    let name = functions.name(kind, part, &template.source, called, |name| {
                        template.prototype.replace('@', name)
                    });
                    let list: Vec<String> = arguments
                        .iter()
                        .zip(&template.params)
                        .map(|(argument, param)| typed(place(argument), &param.ctype))
                        .collect();
                    let _ = writeln!(
                        body,
                        "    EVENT({number}, 1);\n    {name}(rt, {}, arena + {});\n    EVENT({number}, 0);",
                        list.join(", "),
                        plan.scratch[number]
                    );
                    own_name = name;
                }
                Call::Own(call) => {
                    own_name = call.symbol();
                    own.entry(own_name.clone()).or_insert_with(|| call.file());
                    let list: Vec<String> = call.arguments.iter().map(place).collect();
                    body.push_str(&call.text(number, &list));
                }
                Call::Extern { arguments } => {
                    let index = externs.next().unwrap_or(0);
                    let list: Vec<String> = arguments.iter().map(place).collect();
                    let _ = writeln!(
                        body,
                        "    {{\n        void *list[] = {{{}}};\n        EVENT({number}, 1);\n        int failed = rt->call_extern(rt->pool, {index}, list);\n        EVENT({number}, 0);\n        if (failed) return 1 + {index};\n    }}",
                        list.join(", ")
                    );
                    own_name = format!("extern_{index}");
                }
            }
        }
        body.push_str(guards.get(&number).map_or("", String::as_str));
        names.push(own_name);
    }
    let mut code = functions.files(isa);
    let mut prototypes = functions.prototypes().to_vec();
    if !own.is_empty() {
        code.push(SourceFile::new("kiln_operation.h", own::HEADER));
        prototypes.push("#include \"kiln_operation.h\"".to_owned());
        prototypes.extend(own.keys().map(|symbol| own::prototype(symbol)));
        code.extend(own.into_values());
    }
    code.push(step_file(graph, plan, &prototypes, &body));
    Emitted { code, names }
}

/// The name of a template's function: what it computes.
pub(super) fn template_name(graph: &Graph, kernel: &Kernel) -> &'static str {
    match &kernel.kind {
        KernelKind::Library(node) => match graph.node(*node).op {
            Op::Attention(_) => "attention",
            Op::AttentionGrad(_) => "attention_grad",
            _ => "product",
        },
        KernelKind::Nest(_) | KernelKind::Contraction(..) | KernelKind::Together(_) => "product",
    }
}

/// `SERIAL(kernel, function, n, places..)` or `PARALLEL(kernel, function, n, grain, places..)`.
fn task(body: &mut String, number: usize, name: &str, launch: &Launch, places: &[String]) {
    if launch.n == 0 {
        return;
    }
    let (run, grain) = match launch.parallel {
        true => ("PARALLEL", format!("{}, ", launch.grain)),
        false => ("SERIAL", String::new()),
    };
    let places = places.join(", ");
    let _ = writeln!(
        body,
        "    {run}({number}, {name}, {}, {grain}{places});",
        launch.n
    );
}

/// A task over several tensors: a line of places for each, and where their elements end.
fn together(body: &mut String, number: usize, name: &str, tensors: &[(Vec<String>, i64)]) {
    let mut end = 0;
    let ends: Vec<String> = tensors
        .iter()
        .map(|(_, elements)| {
            end += elements;
            end.to_string()
        })
        .collect();
    let Some((first, _)) = tensors.first().filter(|_| end > 0) else {
        return;
    };
    let lines: Vec<String> = tensors
        .iter()
        .map(|(places, _)| format!("            {},\n", places.join(", ")))
        .collect();
    let grain = if end < SERIAL_POINTS { 0 } else { FLAT_GRAIN };
    let _ = writeln!(
        body,
        "    {{\n        static const struct kiln_place places[] = {{\n{}        }};\n        static const int64_t ends[] = {{{}}};\n        \
         kiln_run_each(&call, {number}, {name}, {grain}, {}, ends, places, {});\n    }}",
        lines.concat(),
        ends.join(", "),
        tensors.len(),
        first.len()
    );
}

/// Where an argument is, as an entry of a table.
fn place_entry(plan: &Plan, argument: Argument, scratch: usize) -> String {
    match argument {
        Argument::Buffer(buffer) => match plan.places.get(&buffer) {
            Some(Place::Input(index)) => format!("INPUT({index})"),
            Some(Place::Output(index)) => format!("OUTPUT({index})"),
            Some(Place::Arena(offset)) => format!("ARENA({offset})"),
            // A buffer that no kernel makes: it has no elements.
            None => "ARENA(0)".into(),
        },
        Argument::Scalar(index) => format!("SCALAR({index})"),
        Argument::Scratch(offset) => format!("ARENA({})", scratch + offset),
    }
}

fn place_text(plan: &Plan, argument: Argument, scratch: usize) -> String {
    match argument {
        Argument::Buffer(buffer) => match plan.places.get(&buffer) {
            Some(Place::Input(index)) => format!("inputs[{index}]"),
            Some(Place::Output(index)) => format!("outputs[{index}]"),
            Some(Place::Arena(offset)) => format!("arena + {offset}"),
            // A buffer that no kernel makes: it has no elements.
            None => "arena".into(),
        },
        Argument::Scalar(index) => format!("(void *)(scalars + {index})"),
        Argument::Scratch(offset) => format!("arena + {}", scratch + offset),
    }
}

/// A place as an argument of type `ctype`: the arena is made of bytes, everything else is `void *`.
fn typed(place: String, ctype: &str) -> String {
    if place.starts_with("arena") {
        format!("({ctype})({place})")
    } else {
        place
    }
}

fn comment(graph: &Graph, kernel: &Kernel, plan: &Plan, report: &KernelReport, body: &mut String) {
    if let KernelKind::Together(nests) = &kernel.kind {
        // As many buffers as tensors: the tables below say where they are.
        let operations = report.nodes.len();
        let _ = writeln!(
            body,
            "    /* {} tensors side by side, {operations} operations */",
            nests.len()
        );
        return;
    }
    let fused: Vec<String> = report.nodes.iter().map(ToString::to_string).collect();
    let _ = writeln!(body, "    /* {}", wrap(&fused.join(", ")));
    for (word, buffers) in [("from", &kernel.reads), ("to", &kernel.writes)] {
        let list: Vec<String> = buffers
            .iter()
            .map(|&buffer| {
                let ty = graph.ty(buffer.value(graph));
                format!("{} {ty}", place_text(plan, Argument::Buffer(buffer), 0))
            })
            .collect();
        if !list.is_empty() {
            let _ = writeln!(body, "     * {word} {}", wrap(&list.join(", ")));
        }
    }
    body.push_str("     */\n");
}

/// Breaks a comment into lines; a comment cannot end early.
fn wrap(text: &str) -> String {
    let mut out = String::new();
    let mut length = 0;
    for word in in_comment(text).split(' ') {
        if length + word.len() > 104 {
            out.push_str("\n     *   ");
            length = 4;
        } else if length > 0 {
            out.push(' ');
        }
        out.push_str(word);
        length += word.len() + 1;
    }
    out
}

/// The file with the step's entry.
fn step_file(graph: &Graph, plan: &Plan, prototypes: &[String], body: &str) -> SourceFile {
    let signature = Signature::new(
        graph.parameters().len(),
        graph.outputs.len(),
        graph.scalars().len(),
        plan.arena_bytes,
    );
    let mut step = format!(
        "/* The step `{}`: its kernels, in the order in which they run. */\n",
        in_comment(&graph.name)
    );
    // The entry is a long list of calls: the compiler has nothing to optimise there, and would spend much
    // time on it.
    step.push_str("#if defined(__GNUC__) && !defined(__clang__)\n#pragma GCC optimize(\"O0\")\n#endif\n");
    step.push_str("#include \"kiln_calls.h\"\n\n");
    for prototype in prototypes {
        let _ = writeln!(step, "{prototype}");
    }
    step.push_str("\n#define EVENT(number, begin) kiln_event(&call, number, begin)\n\n");
    step.push_str(&signature.to_c());
    let _ = write!(
        step,
        "\nint kiln_step(const kiln_runtime *rt, void *const *inputs, void *const *outputs, void *memory,\n              \
         const uint64_t *scalars) {{\n    char *arena = memory;\n    const struct kiln_call call = {{rt, inputs, outputs, arena, scalars}};\n    (void)call;\n{body}    \
         return 0;\n}}\n"
    );
    SourceFile::new("step.c", step)
}
