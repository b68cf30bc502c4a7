//! The source tree: functions once each, spread over files of similar size, and the step that calls them.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use rustc_hash::FxHashMap;

use kiln_cpu::{Signature, SourceFile};
use kiln_graph::{Graph, Node, Op};

use super::nest::{Argument, Launch};
use super::{Call, EmitOptions, KernelCode};
use crate::kernels;
use crate::plan::{Place, Plan};
use crate::report::{BufferReport, Buffers, KernelReport};
use crate::schedule::{Buffer, Kernel, KernelKind, Schedule};

/// Characters of C in one file, roughly: files compile in parallel, and none should be much longer than the rest.
const FILE_LENGTH: usize = 48 * 1024;

/// A source tree and what is known of its kernels.
#[derive(Clone, Debug)]
pub struct Emitted {
    /// The files.
    pub sources: Vec<SourceFile>,
    /// Kernels, by the number that profiling events carry.
    pub kernels: Vec<KernelReport>,
    /// The buffers that kernels share.
    pub buffers: Vec<BufferReport>,
}

impl Kernel {
    /// Operands and results of a library operation, as arguments.
    pub fn operands(&self, graph: &Graph, node: Node) -> Vec<Argument> {
        let data = graph.node(node);
        let all = data.inputs.iter().chain(&data.outputs);
        all.map(|&value| Argument::Buffer(Buffer::Value(value))).collect()
    }
}

struct Functions {
    /// Final text of each function, in order of first use.
    texts: Vec<String>,
    names: FxHashMap<String, String>,
    prototypes: Vec<String>,
}

impl Functions {
    /// The name of the function with this text (`@` for the name); `kind` begins a new name.
    fn name(&mut self, kind: &str, text: &str, prototype: impl FnOnce(&str) -> String) -> String {
        if let Some(name) = self.names.get(text) {
            return name.clone();
        }
        let name = format!("{kind}_{}", self.texts.len());
        self.names.insert(text.to_owned(), name.clone());
        self.texts.push(tidy(&text.replace('@', &name)));
        self.prototypes.push(prototype(&name));
        name
    }
}

/// Writes the tree for a scheduled and planned graph.
pub fn emit(
    graph: &Graph,
    schedule: &Schedule,
    codes: &[KernelCode],
    plan: &Plan,
    options: &EmitOptions,
) -> Emitted {
    let mut functions = Functions {
        texts: Vec::new(),
        names: FxHashMap::default(),
        prototypes: Vec::new(),
    };
    let mut helpers: BTreeSet<&kernels::Helper> = BTreeSet::new();
    let mut body = String::new();
    let mut reports = Vec::new();
    let buffers = Buffers::new(graph, schedule, plan);
    for (number, (kernel, code)) in schedule.kernels.iter().zip(codes).enumerate() {
        let mut report = buffers.describe(graph, kernel, (plan.scratch[number], code.scratch));
        comment(graph, kernel, plan, &report, &mut body);
        for call in &code.calls {
            let place = |argument: &Argument| place_text(plan, *argument, plan.scratch[number]);
            match call {
                Call::Task(launch) => {
                    let kind = kind_name(graph, kernel);
                    let name = functions.name(&kind, &launch.text, |name| {
                        format!("void {name}(void *ctx, int64_t begin, int64_t end, int thread);")
                    });
                    let list: Vec<String> = launch.arguments.iter().map(place).collect();
                    task(&mut body, number, &name, launch, &list);
                    if report.name.is_empty() {
                        report.name = name;
                    }
                }
                Call::Kernel {
                    kernel: template,
                    arguments,
                } => {
                    helpers.extend(&template.helpers);
                    let name = functions.name(template_name(graph, kernel), &template.source, |name| {
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
                    report.name = name;
                }
                Call::Extern { index, arguments } => {
                    let list: Vec<String> = arguments.iter().map(place).collect();
                    let _ = writeln!(
                        body,
                        "    {{\n        void *list[] = {{{}}};\n        EVENT({number}, 1);\n        int failed = rt->call_extern(rt->pool, {index}, list);\n        EVENT({number}, 0);\n        if (failed) return 1 + {index};\n    }}",
                        list.join(", ")
                    );
                    report.name = format!("extern_{index}");
                }
            }
        }
        reports.push(report);
    }
    let sources = files(graph, plan, options, &functions, &helpers, &body);
    Emitted {
        sources,
        kernels: reports,
        buffers: buffers.list,
    }
}

/// Names of functions say what kind of kernel they are.
fn kind_name(graph: &Graph, kernel: &Kernel) -> String {
    match &kernel.kind {
        KernelKind::Nest(nest) if nest.split.is_some() => "rows".into(),
        KernelKind::Nest(nest) if nest.members.is_empty() => "copy".into(),
        KernelKind::Nest(_) => "points".into(),
        KernelKind::Library(node) | KernelKind::Contraction(node, _) => graph.node(*node).op.name().into(),
    }
}

/// Templates are named by what they compute.
fn template_name(graph: &Graph, kernel: &Kernel) -> &'static str {
    match &kernel.kind {
        KernelKind::Library(node) => match graph.node(*node).op {
            Op::Attention(_) => "attention",
            Op::AttentionGrad(_) => "attention_grad",
            _ => "product",
        },
        KernelKind::Nest(_) | KernelKind::Contraction(..) => "product",
    }
}

fn task(body: &mut String, number: usize, name: &str, launch: &Launch, arguments: &[String]) {
    if launch.n == 0 {
        return;
    }
    let run = if launch.parallel { "PARALLEL" } else { "SERIAL" };
    let _ = writeln!(
        body,
        "    {{\n        void *list[] = {{{}}};",
        arguments.join(", ")
    );
    let _ = writeln!(
        body,
        "        {run}({number}, {name}, {}, {});\n    }}",
        launch.n, launch.grain
    );
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
    let fused: Vec<String> = report.nodes.iter().map(ToString::to_string).collect();
    let _ = writeln!(body, "    /* {}", wrap(&fused.join(", ")));
    for (word, buffers) in [("from", &kernel.reads), ("to", &kernel.writes)] {
        let list: Vec<String> = buffers
            .iter()
            .map(|&buffer| {
                let ty = match buffer {
                    Buffer::Value(value) => graph.ty(value).to_string(),
                    Buffer::Output(output) => graph.ty(graph.outputs[output as usize].value).to_string(),
                };
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
    for word in text.replace("*/", "* /").split(' ') {
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

fn files(
    graph: &Graph,
    plan: &Plan,
    options: &EmitOptions,
    functions: &Functions,
    helpers: &BTreeSet<&kernels::Helper>,
    body: &str,
) -> Vec<SourceFile> {
    let prelude = format!(
        "{}#include \"kiln_nest.h\"\n",
        kernels::vector::prelude(options.isa)
    );
    let mut sources = kernels::vector::headers();
    sources.push(SourceFile::new("kiln_nest.h", include_str!("c/kiln_nest.h")));
    let mut declarations = String::new();
    for helper in helpers {
        let _ = writeln!(declarations, "{}", helper.prototype);
    }
    let mut file = String::new();
    let mut count = 0;
    let mut flush = |file: &mut String, sources: &mut Vec<SourceFile>| {
        if !file.is_empty() {
            let text = format!(
                "/* Kernels of `{}`. */\n{prelude}{declarations}\n{file}",
                graph.name
            );
            sources.push(SourceFile::new(format!("kernels_{count}.c"), text));
            count += 1;
            file.clear();
        }
    };
    for text in helpers
        .iter()
        .map(|helper| &helper.definition)
        .chain(&functions.texts)
    {
        file.push_str(text);
        file.push('\n');
        if file.len() > FILE_LENGTH {
            flush(&mut file, &mut sources);
        }
    }
    flush(&mut file, &mut sources);
    let signature = Signature::new(
        graph.parameters().len(),
        graph.outputs.len(),
        graph.scalars().len(),
        plan.arena_bytes,
    );
    let mut step = format!(
        "/* The step `{}`: its kernels, in the order in which they run. */\n",
        graph.name
    );
    // A long list of calls: there is nothing to optimise, and much to spend time on.
    step.push_str("#if defined(__GNUC__) && !defined(__clang__)\n#pragma GCC optimize(\"O0\")\n#endif\n");
    step.push_str("#include \"kiln_runtime.h\"\n\n");
    for prototype in &functions.prototypes {
        let _ = writeln!(step, "{prototype}");
    }
    step.push_str(
        "\n#define EVENT(number, begin) do { if (rt->kernel_event) rt->kernel_event(rt->pool, number, begin); } while (0)\n\
         #define PARALLEL(number, f, n, grain) \\\n    do { EVENT(number, 1); rt->parallel_for(rt->pool, n, grain, f, list); EVENT(number, 0); } while (0)\n\
         #define SERIAL(number, f, n, grain) do { EVENT(number, 1); f(list, 0, n, 0); EVENT(number, 0); } while (0)\n\n",
    );
    step.push_str(&signature.to_c());
    let _ = write!(
        step,
        "\nint kiln_step(const kiln_runtime *rt, void *const *inputs, void *const *outputs, void *memory,\n              \
         const uint64_t *scalars) {{\n    char *arena = memory;\n    (void)inputs, (void)outputs, (void)arena, (void)scalars;\n{body}    \
         return 0;\n}}\n"
    );
    sources.push(SourceFile::new("step.c", step));
    sources
}

/// Indents C by its braces.
fn tidy(text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 5 / 4);
    let mut depth = 0usize;
    for line in text.lines() {
        let line = line.trim();
        let closing = line.chars().take_while(|&c| c == '}').count();
        for _ in 0..depth.saturating_sub(closing) {
            out.push_str("    ");
        }
        out.push_str(line);
        out.push('\n');
        for c in line.chars() {
            match c {
                '{' => depth += 1,
                '}' => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
    }
    out
}
