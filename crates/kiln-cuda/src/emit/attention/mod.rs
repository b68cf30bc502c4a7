//! Attention, forward and backward: writes the case (a struct of constants) for which the templates of
//! [`crate::kernels::attention`] are compiled.
//!
//! Operands are windows of any strides, so heads are never split or joined in memory, and heads of keys that
//! several heads of queries share are never repeated. Where a mask hides keys, one more launch says for each
//! tile of scores whether all, some or none are hidden there: attention leaves out tiles of the first kind,
//! and reads the mask in those of the second alone.
//!
//! Types of 16 bits, and f32 where it may be rounded to TF32, are computed by tensor cores where widths are
//! multiples of 8 up to 128 and rows begin at multiples of 16 bytes; everything else is computed in f32 or
//! f64 by the plain kernels. On Hopper groups of four warps multiply together where widths are 64 or 128.
//!
//! A mask that is causal order, computed from coordinates, is known here (`order`): no launch looks at it,
//! and nobody reads it.
//!
//! `operands` collects what an operation reads, `plan` cuts it into tiles, `case` writes the struct of
//! constants.

mod case;
mod operands;
mod order;
mod plan;

use kiln_compiler::schedule::Kernel;
use kiln_graph::{Graph, Node, Op};

use self::case::Case;
use self::operands::{Gradient, Operands, View};
use self::plan::{Element, Extents, Plan, TensorPlan};
use super::after::Role;
use super::product::warpgroups::CAPABILITY;
use super::{Argument, EmitOptions, KernelCode, Launch};
use crate::code::FunctionText;
use crate::kernels::attention::{TEMPLATES, TENSOR_TEMPLATES};

/// The code of `node`; none if nothing here computes it.
pub fn generate(graph: &Graph, kernel: &Kernel, node: Node, options: &EmitOptions<'_>) -> Option<KernelCode> {
    let mut results = graph.node(node).outputs.iter();
    if results.all(|&value| graph.ty(value).numel() == 0) {
        return Some(KernelCode::default());
    }
    let operands = Operands::new(graph, kernel, node, options)?;
    let mut writer = Writer {
        element: operands.tensor_element(options),
        has_groups: options.capability == CAPABILITY,
        most_shared_bytes: TensorPlan::most_shared_bytes(options.capability),
        operands,
        code: KernelCode::default(),
    };
    match graph.node(node).op {
        Op::Attention(_) => writer.forward()?,
        _ => writer.backward()?,
    }
    Some(writer.code)
}

struct Writer {
    operands: Operands,
    /// The elements that tensor cores multiply, if they may compute this.
    element: Option<Element>,
    /// Whether the device has instructions for groups of warps.
    has_groups: bool,
    /// Bytes of shared memory that a block may have.
    most_shared_bytes: u32,
    code: KernelCode,
}

/// Parameters of a kernel, what is passed for them, and the statements that read them.
#[derive(Clone, Default)]
struct Reading {
    parameters: Vec<String>,
    arguments: Vec<Argument>,
    statements: String,
}

impl Reading {
    fn pass(&mut self, parameter: impl Into<String>, argument: Argument) {
        self.parameters.push(parameter.into());
        self.arguments.push(argument);
    }

    /// A tensor that member `name` of `of` is to point to.
    fn tensor(&mut self, of: &str, name: &str, view: &View) {
        self.pass(
            format!("const {}* {name}", view.ctype),
            Argument::Buffer(view.buffer),
        );
        self.statements
            .push_str(&format!("{of}.{name} = {name} + {};\n", view.offset));
    }

    /// A number that member `name` of `of` is to hold.
    fn number(&mut self, of: &str, name: &str, (ctype, argument): &(&'static str, Argument)) {
        self.pass(format!("const {ctype}* {name}"), argument.clone());
        self.statements
            .push_str(&format!("{of}.{name} = kiln_attention_wide(*{name});\n"));
    }

    /// A word that member `name` of the operands is to hold.
    fn word(&mut self, name: &str, argument: &Argument) {
        self.pass(format!("const kiln_u64* {name}"), argument.clone());
        self.statements.push_str(&format!("o.{name} = *{name};\n"));
    }
}

impl Writer {
    /// A plan for tensor cores, if they may compute this and the tiles fit.
    fn tensor(
        &self,
        plan: impl Fn(&Extents, Element) -> Option<TensorPlan>,
        of: plan::Kernel,
    ) -> Option<TensorPlan> {
        let extents = &self.operands.extents;
        let element = self.element?;
        let fits = |plan: &TensorPlan| {
            plan.shared_bytes(extents, of != plan::Kernel::Forward) <= self.most_shared_bytes
        };
        let given = self.operands.given_result().is_some();
        let by_groups = TensorPlan::by_groups(extents, of, given);
        by_groups
            .filter(|plan| self.has_groups && element == Element::Half && fits(plan))
            .or_else(|| plan(extents, element).filter(fits))
    }

    /// The plan for the whole gradient in one kernel, if that computes this.
    fn at_once(&self) -> Option<TensorPlan> {
        let plan = TensorPlan::at_once(&self.operands.extents)?;
        let fits = plan.shared_bytes(&self.operands.extents, true) <= self.most_shared_bytes;
        let given = self.operands.given_result().is_some();
        (self.element == Some(Element::Half) && given && fits).then_some(plan)
    }

    /// Bytes of working memory, at a multiple of 256.
    fn scratch(&mut self, bytes: usize) -> Argument {
        let at = self.code.scratch;
        self.code.scratch += bytes.next_multiple_of(256);
        Argument::Scratch(at)
    }

    /// The launch of `blocks` blocks of the template that `call` calls.
    fn launch(
        &mut self,
        case: &Case<'_>,
        reading: Reading,
        call: &str,
        blocks: usize,
        shared_bytes: u32,
    ) -> Option<()> {
        let blocks = i32::try_from(blocks).ok()?;
        let text = FunctionText {
            helpers: format!(
                "{TEMPLATES}{}{}",
                if case.tensor.is_some() {
                    TENSOR_TEMPLATES
                } else {
                    ""
                },
                case.text()
            ),
            parameters: reading.parameters,
            body: format!("{}{call}", reading.statements),
            threads: case.threads() as u32,
            device_only: false,
            blocks: case.tensor.map_or(0, |tensor| tensor.blocks),
        };
        self.code.calls.push(super::Call::Launch(Launch {
            text,
            grid: [blocks as u32, 1, 1],
            shared_bytes,
            role: Role::Alone,
            arguments: reading.arguments,
        }));
        Some(())
    }

    /// The parameters that all kernels read. Launches the look at the mask's tiles first, where attention
    /// may leave some of them out.
    fn operands(&mut self, case: &Case<'_>) -> Option<Reading> {
        let mut reading = Reading {
            statements: "kiln_attention_operands<@_case> o = {};\n".into(),
            ..Reading::default()
        };
        let operands = &self.operands;
        for (name, view) in [
            ("query", &operands.query),
            ("key", &operands.key),
            ("value", &operands.value),
        ] {
            reading.tensor("o", name, view);
        }
        let masks = [("mask", &operands.mask), ("hidden", &operands.hidden)];
        for (name, view) in masks
            .into_iter()
            .filter_map(|(name, view)| Some((name, view.as_ref()?)))
        {
            reading.tensor("o", name, view);
        }
        for (name, number) in &operands.numbers {
            reading.number("o", name, number);
        }
        for (name, word) in &operands.words {
            reading.word(name, word);
        }
        if let Some(tiles) = case.mapped_tiles() {
            let map = self.scratch(4 * tiles);
            let mut looking = Reading::default();
            let hidden = self.operands.hidden.as_ref()?;
            looking.pass("const unsigned char* hidden", Argument::Buffer(hidden.buffer));
            looking.pass("int* map", map.clone());
            let call = format!("kiln_attention_map<@_case>(hidden + {}, map);\n", hidden.offset);
            self.launch(case, looking, &call, tiles, 0)?;
            reading.pass("const int* map", map);
            reading.statements.push_str("o.map = map;\n");
        }
        Some(reading)
    }

    fn forward(&mut self) -> Option<()> {
        let operands = self.operands.clone();
        let [out, stats] = operands.results.as_slice() else {
            return None;
        };
        let e = operands.extents;
        let plan = Plan::new(&e, operands.real, e.value_width);
        let case = Case {
            operands: &operands,
            plan,
            tensor: self.tensor(TensorPlan::forward, plan::Kernel::Forward),
            views: vec![("out", out)],
        };
        let mut reading = self.operands(&case)?;
        reading.pass(format!("{}* out", out.ctype), Argument::Buffer(out.buffer));
        reading.pass(format!("{}* stats", stats.ctype), Argument::Buffer(stats.buffer));
        let (call, shared_bytes) = match &case.tensor {
            Some(tensor) => (
                "kiln_attention_tensor_forward<@_case>(o, out, stats);\n",
                tensor.shared_bytes(&e, false),
            ),
            None => (
                "kiln_attention_forward<@_case>(o, out, stats);\n",
                plan.shared_bytes(1),
            ),
        };
        let blocks = e.batch * e.heads * case.row_tiles();
        self.launch(&case, reading, call, blocks, shared_bytes)
    }

    fn backward(&mut self) -> Option<()> {
        let operands = self.operands.clone();
        let [d_query, d_key, d_value] = operands.results.as_slice() else {
            return None;
        };
        let gradient = operands.gradient.as_ref()?;
        let e = operands.extents;
        let plan = Plan::new(&e, operands.real, e.width.max(e.value_width));
        let case = |tensor: Option<TensorPlan>| Case {
            operands: &operands,
            plan,
            tensor,
            views: vec![
                ("d_out", &gradient.d_out),
                ("out", operands.given_result().unwrap_or(&gradient.d_out)),
                ("d_query", d_query),
                ("d_key", d_key),
                ("d_value", d_value),
            ],
        };
        if let Some(tensor) = self.at_once() {
            let case = case(Some(tensor));
            let mut reading = self.gradient(&case, gradient)?;
            for (name, view) in [("d_query", d_query), ("d_key", d_key), ("d_value", d_value)] {
                reading.pass(format!("{}* {name}", view.ctype), Argument::Buffer(view.buffer));
            }
            let call = "kiln_attention_tensor_gradient<@_case>(o, g, d_query, d_key, d_value);\n";
            return self.launch(
                &case,
                reading,
                call,
                e.batch * e.heads,
                tensor.shared_bytes(&e, true),
            );
        }
        let most_shared = self.most_shared_bytes;
        let of_queries = case(self.tensor(TensorPlan::d_query, plan::Kernel::DQuery));
        let of_keys = case(self.tensor(
            |e, element| TensorPlan::d_key(e, element, most_shared),
            plan::Kernel::DKey,
        ));
        let common = self.gradient(&of_queries, gradient)?;
        for (case, name, results, heads, weights) in [
            (&of_queries, "d_query", vec![("d_query", d_query)], e.heads, 1),
            (
                &of_keys,
                "d_key",
                vec![("d_key", d_key), ("d_value", d_value)],
                e.key_heads,
                2,
            ),
        ] {
            let mut reading = common.clone();
            for (name, view) in &results {
                reading.pass(format!("{}* {name}", view.ctype), Argument::Buffer(view.buffer));
            }
            let names: Vec<&str> = results.iter().map(|(name, _)| *name).collect();
            let (prefix, shared_bytes) = match &case.tensor {
                Some(tensor) => ("kiln_attention_tensor", tensor.shared_bytes(&e, true)),
                None => ("kiln_attention", plan.shared_bytes(weights)),
            };
            let tiles = if name == "d_query" {
                case.row_tiles()
            } else {
                case.key_row_tiles()
            };
            let call = format!("{prefix}_{name}<@_case>(o, g, {});\n", names.join(", "));
            self.launch(case, reading, &call, e.batch * heads * tiles, shared_bytes)?;
        }
        Some(())
    }

    /// The parameters that both kernels of the gradient read.
    fn gradient(&mut self, case: &Case<'_>, gradient: &Gradient) -> Option<Reading> {
        let e = case.operands.extents;
        let mut reading = self.operands(case)?;
        reading
            .statements
            .push_str("kiln_attention_gradient<@_case> g = {};\n");
        reading.tensor("g", "d_out", &gradient.d_out);
        reading.tensor("g", "stats", &gradient.stats);
        if let Some(out) = case.operands.given_result()
            && case.tensor.is_some()
        {
            reading.tensor("g", "out", out);
        }
        for (name, number) in &gradient.numbers {
            reading.number("g", name, number);
        }
        let heads = e.batch * e.heads;
        if !case.tensor.is_some_and(|tensor| tensor.at_once) {
            let delta = self.scratch(heads * e.queries * case.plan.bytes);
            reading.pass(format!("{}* delta", case.real()), delta);
            reading.statements.push_str("g.delta = delta;\n");
        }
        if case.leaves_out() {
            let counts = self.scratch(4 * heads * case.plan.tiles(e.queries));
            reading.pass("int* counts", counts);
            reading.statements.push_str("g.counts = counts;\n");
        }
        Some(reading)
    }
}
