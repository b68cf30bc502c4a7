//! Sorting along a dimension, whole or the first few.

use kiln_graph::{Graph, Node};

use super::super::elements::word;
use super::super::text::Text;
use super::super::{Argument, Call, KernelCode, expressions};
use super::Lanes;
use super::order::{Order, Port};

/// The first `keep` elements of each sorted line, and where they were.
pub(super) fn sort(
    graph: &Graph,
    node: Node,
    axis: usize,
    descending: bool,
    keep: usize,
) -> Option<KernelCode> {
    let data = graph.node(node);
    let x = data.inputs[0];
    let Lanes { outer, extent, inner } = Lanes::new(graph.shape(x), axis);
    let dtype = graph.dtype(x);
    u32::try_from(extent + 1).ok()?;
    let order = Order {
        rows: outer * inner,
        extent,
        keep,
        wide: dtype.size() == 8,
        across: inner > 1,
    };
    let (from, to) = (extent * inner, keep * inner);
    let read = format!(
        "Item::make({}kiln_key(x[row / {inner} * {from} + k * {inner} + row % {inner}]), (kiln_u32)k)",
        if descending { "~" } else { "" }
    );
    let index = expressions::memory_type(graph.dtype(data.outputs[1]));
    let write = format!(
        "const Index place = row / {inner} * {to} + k * {inner} + row % {inner};
values[place] = words[row / {inner} * {from} + (Index)item.place() * {inner} + row % {inner}];
places[place] = ({index})item.place();"
    );
    let memory = expressions::memory_type(dtype);
    let source = |text: Text| text.reads(memory, "x", Argument::value(x));
    let bits = word(dtype.size());
    // Values are moved as they are, whatever a NaN's bits.
    let sink = |text: Text| {
        text.reads(bits, "words", Argument::value(x))
            .writes(bits, "values", Argument::value(data.outputs[0]))
            .writes(index, "places", Argument::value(data.outputs[1]))
    };
    let launches = order.launches(
        0,
        &Port {
            declare: &source,
            text: &read,
        },
        &Port {
            declare: &sink,
            text: &write,
        },
    );
    Some(KernelCode {
        calls: launches.into_iter().map(Call::Launch).collect(),
        scratch: order.scratch(),
    })
}
