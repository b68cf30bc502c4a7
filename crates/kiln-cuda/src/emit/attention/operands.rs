//! What an attention reads and writes: windows, numbers, results.

use kiln_compiler::schedule::access::{Strided, strided};
use kiln_compiler::schedule::attention::result_of_forward;
use kiln_compiler::schedule::layout::strides;
use kiln_compiler::schedule::{Buffer, Kernel};
use kiln_graph::op::{AttentionDims, Op};
use kiln_graph::{DType, Graph, Node, Value};

use super::order::hidden_ahead;
use super::plan::{Element, Extents};
use crate::emit::{Argument, EmitOptions};

/// A tensor of four dimensions in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// Where it is.
    pub buffer: Buffer,
    /// Its elements' type in CUDA C++.
    pub ctype: &'static str,
    /// Elements in front of its first.
    pub offset: i64,
    /// Elements between neighbours along each dimension: batch, head, row and column.
    pub strides: [i64; 4],
    /// Its extents.
    pub extents: [usize; 4],
}

impl View {
    /// Whether four neighbours of a row may be moved at once.
    pub fn vectors(&self) -> bool {
        self.rows_begin_at(4)
    }

    /// Whether rows are contiguous and begin at multiples of `count` elements.
    pub fn rows_begin_at(&self, count: i64) -> bool {
        self.strides[3] == 1
            && (self.extents[3] as i64) % count == 0
            && self.offset % count == 0
            && self.strides[..3].iter().all(|stride| stride % count == 0)
    }

    /// The integer type of distances in a head.
    pub fn index(&self) -> &'static str {
        let reach = |axis: usize| self.strides[axis].abs() * self.extents[axis] as i64;
        // Threads beyond the last row also compute distances, without reading there; these reach at most a
        // tile further.
        match reach(2) + reach(3) + 128 * (self.strides[2].abs() + self.strides[3].abs())
            < i64::from(i32::MAX)
        {
            true => "int",
            false => "long long",
        }
    }
}

/// A number: its type in CUDA C++ and where it is.
pub type Number = (&'static str, Argument);

/// What the gradient reads besides the forward's operands.
#[derive(Debug, Clone)]
pub struct Gradient {
    /// The gradient of the result.
    pub d_out: View,
    /// The result, where the kernel reads it.
    pub out: Option<View>,
    /// Largest scores and sums of exponentials.
    pub stats: View,
    /// `d_scale`, `inner` and, with dropout, `d_factor`.
    pub numbers: Vec<(&'static str, Number)>,
}

/// Operands and results of an attention.
#[derive(Debug, Clone)]
pub struct Operands {
    /// The operation's properties.
    pub dims: AttentionDims,
    /// The extents.
    pub extents: Extents,
    /// The type that is computed in.
    pub real: DType,
    /// Queries.
    pub query: View,
    /// Keys.
    pub key: View,
    /// Values.
    pub value: View,
    /// What is added to scores; dimensions of one element repeat.
    pub mask: Option<View>,
    /// Which scores are `fill`.
    pub hidden: Option<View>,
    /// Where these are those of the keys behind a position, by how many positions that is ahead of the query:
    /// 0 in causal order. Then nobody reads the mask.
    pub ahead: Option<i64>,
    /// Numbers by name: `scale`, `fill`, `keep`, `factor`, those that occur.
    pub numbers: Vec<(&'static str, Number)>,
    /// `seed` and `stream`, where there is dropout.
    pub words: Vec<(&'static str, Argument)>,
    /// What only the gradient has.
    pub gradient: Option<Gradient>,
    /// The results.
    pub results: Vec<View>,
}

/// The type of elements in CUDA C++; none for types that attention does not take.
pub fn ctype(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some("float"),
        DType::F64 => Some("double"),
        DType::F16 => Some("kiln_f16"),
        DType::BF16 => Some("kiln_bf16"),
        DType::Bool => Some("unsigned char"),
        _ => None,
    }
}

impl Operands {
    /// Those of `node`; none if it is no attention, or of empty tensors.
    pub fn new(graph: &Graph, kernel: &Kernel, node: Node, options: &EmitOptions<'_>) -> Option<Self> {
        let data = graph.node(node);
        let (Op::Attention(dims) | Op::AttentionGrad(dims)) = &data.op else {
            return None;
        };
        let mut all = data.inputs.iter().chain(&data.outputs);
        if all.any(|&value| graph.ty(value).numel() == 0) {
            return None;
        }
        let read = Reader {
            graph,
            kernel,
            options,
        };
        let at = dims.operands();
        let input = |number: usize| data.inputs[number];
        let [q, k, v] = [0, 1, 2].map(|number| graph.shape(input(number)));
        let mut numbers = vec![("scale", read.number(input(3))?)];
        let mut words = Vec::new();
        if let Some(at) = at.hidden {
            numbers.push(("fill", read.number(input(at + 1))?));
        }
        if let Some(at) = at.dropout {
            words.push(("seed", Argument::value(input(at))));
            words.push(("stream", Argument::value(input(at + 1))));
            numbers.push(("keep", read.number(input(at + 2))?));
            numbers.push(("factor", read.number(input(at + 3))?));
        }
        let gradient = match data.op {
            Op::AttentionGrad(_) => {
                let own = input(at.forward + 1);
                let mut numbers = vec![
                    ("d_scale", read.number(input(at.forward + 2))?),
                    ("inner", read.number(input(at.forward + 3))?),
                ];
                if dims.dropout {
                    numbers.push(("d_factor", read.number(input(at.forward + 4))?));
                }
                let out = result_of_forward(graph, node)
                    .filter(|&out| kernel.reads.contains(&Buffer::Value(out)))
                    .and_then(|out| read.stored(out));
                Some(Gradient {
                    d_out: read.window(own)?,
                    out,
                    stats: read.stored(input(at.forward))?,
                    numbers,
                })
            }
            _ => None,
        };
        // An inner `None` is a mask that attention does not take.
        let mask = |at: Option<usize>| at.map_or(Some(None), |at| read.repeated(input(at)).map(Some));
        Some(Self {
            dims: *dims,
            extents: Extents {
                batch: q[0],
                heads: q[1],
                key_heads: k[1],
                queries: q[2],
                keys: k[2],
                width: q[3],
                value_width: v[3],
            },
            real: graph.dtype(input(0)).compute(),
            query: read.window(input(0))?,
            key: read.window(input(1))?,
            value: read.window(input(2))?,
            mask: mask(at.mask)?,
            hidden: mask(at.hidden)?,
            ahead: at.hidden.and_then(|at| hidden_ahead(graph, input(at))),
            numbers,
            words,
            gradient,
            results: data
                .outputs
                .iter()
                .map(|&value| read.stored(value))
                .collect::<Option<_>>()?,
        })
    }
}

impl Operands {
    /// The result, where the gradient reads it and 16 bytes of it can be read at once.
    pub fn given_result(&self) -> Option<&View> {
        let out = self.gradient.as_ref()?.out.as_ref()?;
        let bytes = if out.ctype == "float" { 4 } else { 2 };
        (out.ctype == self.query.ctype && out.rows_begin_at(16 / bytes)).then_some(out)
    }

    /// The elements that tensor cores multiply: 16-bit ones, or TF32 where f32 may be rounded. None if
    /// tensor cores may not compute this, or if 16 bytes of a tensor cannot be copied at once.
    pub fn tensor_element(&self, options: &EmitOptions<'_>) -> Option<Element> {
        let element = match self.query.ctype {
            "kiln_f16" | "kiln_bf16" => Element::Half,
            "float" if options.tf32 => Element::Tf32,
            _ => return None,
        };
        let own = [&self.query, &self.key, &self.value];
        let mut tensors = own
            .into_iter()
            .chain(self.gradient.as_ref().map(|gradient| &gradient.d_out));
        let at_once = 16 / element.bytes() as i64;
        let fits = options.capability >= (8, 0) && tensors.all(|view| view.rows_begin_at(at_once));
        fits.then_some(element)
    }
}

struct Reader<'a> {
    graph: &'a Graph,
    kernel: &'a Kernel,
    options: &'a EmitOptions<'a>,
}

impl Reader<'_> {
    fn view(&self, value: Value, base: Value, offset: i64, strides: &[i64]) -> Option<View> {
        Some(View {
            buffer: Buffer::Value(base),
            ctype: ctype(self.graph.dtype(value))?,
            offset,
            strides: strides.try_into().ok()?,
            extents: self.graph.shape(value).dims().try_into().ok()?,
        })
    }

    /// A tensor in the layout that it is stored in.
    fn stored(&self, value: Value) -> Option<View> {
        let strides = strides(self.graph.shape(value), self.options.layouts.get(&value));
        self.view(value, value, 0, &strides)
    }

    /// A tensor that is read through a window on what the kernel reads.
    fn window(&self, value: Value) -> Option<View> {
        let stop = |value: Value| self.kernel.reads.contains(&Buffer::Value(value));
        match strided(self.graph, self.options.layouts, value, &stop) {
            Some(Strided {
                base,
                offset,
                strides,
            }) => self.view(value, base, offset, &strides),
            None => self.stored(value),
        }
    }

    /// A mask: dimensions of one element repeat, and those that repeat have one element.
    fn repeated(&self, value: Value) -> Option<View> {
        let mut view = self.window(value)?;
        for (stride, extent) in view.strides.iter_mut().zip(&mut view.extents) {
            if *extent == 1 || *stride == 0 {
                (*stride, *extent) = (0, 1);
            }
        }
        Some(view)
    }

    fn number(&self, value: Value) -> Option<Number> {
        Some((ctype(self.graph.dtype(value))?, Argument::value(value)))
    }
}
