//! C for a nest that computes an operand of a template ([`kiln_compiler::schedule::prologue`]): two
//! functions from the template's loop variables, to one element and to a vector. Buffers and scalars are
//! parameters of the template's kernel, which passes them on.

use kiln_compiler::index::Var;
use kiln_compiler::schedule::prologue::Prologue;
use kiln_graph::Graph;

use super::space::Space;
use super::{Argument, Lanes, Writer, epilogue};
use crate::kernels::{Param, Width};

/// The functions of a prologue.
#[derive(Clone, Debug)]
pub struct Operand {
    /// Their definitions, with `@` for the name of the kernel.
    pub functions: String,
    /// Parameters of the kernel that they are given.
    pub params: Vec<Param>,
    /// The arguments for them.
    pub arguments: Vec<Argument>,
    /// Name of the operand.
    name: &'static str,
    /// How many loop variables there are.
    loops: usize,
}

impl Operand {
    /// Writes the functions of `prologue` for the operand `name`.
    pub fn new(graph: &Graph, prologue: &Prologue, name: &'static str, lanes: i64) -> Self {
        let loops = prologue.nest.extents.len();
        let element = body(graph, prologue, None, lanes);
        let vector = body(graph, prologue, Some(prologue.vector), lanes);
        let params: Vec<Param> = element
            .params
            .iter()
            .map(|param| Param::new(param.ctype.clone(), format!("{name}{}", &param.name[1..])))
            .collect();
        let own: Vec<String> = element
            .params
            .iter()
            .map(|param| format!("{} {}", param.ctype, param.name))
            .collect();
        let places: Vec<String> = (0..loops).map(|var| format!("int64_t i{var}")).collect();
        let function = |ty: &str, suffix: &str, text: &str| {
            format!(
                "static inline {ty} @_{name}{suffix}({}) {{\n{text}}}\n",
                own.iter().chain(&places).cloned().collect::<Vec<_>>().join(", ")
            )
        };
        debug_assert_eq!(element.arguments, vector.arguments);
        Self {
            functions: format!(
                "/* The operand {name} is computed while it is read. */\n{}{}",
                function("float", "", &element.text),
                function("vf", "_vector", &vector.text)
            ),
            params,
            arguments: element.arguments,
            name,
            loops,
        }
    }

    /// The operand `name` without its functions, for a template that is only planned.
    pub fn unwritten(prologue: &Prologue, name: &'static str) -> Self {
        Self {
            functions: String::new(),
            params: Vec::new(),
            arguments: Vec::new(),
            name,
            loops: prologue.nest.extents.len(),
        }
    }

    /// The call for the place with these loop variables.
    pub fn load(&self, width: Width, places: &[&str]) -> String {
        debug_assert_eq!(places.len(), self.loops);
        let suffix = match width {
            Width::Scalar => "",
            Width::Vector => "_vector",
        };
        let params = self.params.iter().map(|param| param.name.as_str());
        let list: Vec<&str> = params.chain(places.iter().copied()).collect();
        format!("@_{}{suffix}({})", self.name, list.join(", "))
    }
}

/// The statements of a function, and the values that they refer to.
struct Body {
    text: String,
    params: Vec<Param>,
    arguments: Vec<Argument>,
}

fn body(graph: &Graph, prologue: &Prologue, vector: Option<Var>, lanes: i64) -> Body {
    let mut space = Space::new(&prologue.nest);
    space.loops.cols = vector.into_iter().collect();
    space.loops.rows = (0..prologue.nest.extents.len() as Var)
        .filter(|&var| Some(var) != vector)
        .collect();
    space.vector = vector;
    let mut writer = Writer::new(graph, &space, lanes);
    writer.named = true;
    writer.sections = vec![Vec::new()];
    let mut result = String::new();
    writer.point_body(Lanes::All, |writer| {
        let register = writer.eval(prologue.value, &prologue.index);
        result = writer.operand(&register, vector.is_some());
    });
    let lines = writer
        .top
        .iter()
        .chain(writer.sections.iter().flatten())
        .chain(&writer.body);
    let mut text: String = lines.map(|line| format!("    {line}\n")).collect();
    text.push_str(&format!("    return {result};\n"));
    Body {
        text,
        params: epilogue::params(&writer),
        arguments: writer.arguments.clone(),
    }
}
