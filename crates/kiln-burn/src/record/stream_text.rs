//! A recording as text, for debug dumps: one operation a line, tensors by position instead of id, so that two
//! recordings of the same step are equal texts.

use std::fmt::Write as _;

use super::recording::Recorded;
use super::words::{Named, Part, Position, Words, type_text};
use crate::stream;

/// The text: inputs, operations, outputs.
pub fn to_text(recorded: &Recorded) -> String {
    let mut text = String::new();
    for (index, input) in recorded.inputs.iter().enumerate() {
        let dies = if input.tensor_dies() {
            ", not used afterwards"
        } else {
            ""
        };
        let _ = writeln!(text, "input in{index}: {}{dies}", type_text(&input.ir));
    }
    let mut words = Words::new(recorded);
    for (number, operation) in recorded.operations.iter().enumerate() {
        let _ = writeln!(
            text,
            "{number:5}: {}",
            line(&stream::name(operation), &words.of(operation))
        );
    }
    for &id in &recorded.output_ids {
        let _ = writeln!(text, "output {}", position(words.position(id)));
    }
    text
}

/// `r5: f32 [2] = NumericFloat.Sum in0 {axis=1}`. Values of runtime scalars are not part of the step, and not
/// of the text.
fn line(name: &str, parts: &[Named]) -> String {
    let (mut operands, mut defined, mut attributes) = (Vec::new(), Vec::new(), Vec::new());
    for Named { name, part } in parts {
        match part {
            Part::Operand(tensor) => operands.push(position(*tensor)),
            Part::Result(index, ty) => defined.push(format!("{}: {ty}", Position::Result(*index))),
            Part::Runtime(kind) => attributes.push(format!("{name}: {kind}")),
            Part::Scalar(value) | Part::Attribute(value) => attributes.push(format!("{name}={value}")),
        }
    }
    let mut text = format!("{} = {name} {}", defined.join(", "), operands.join(", "));
    if !attributes.is_empty() {
        let _ = write!(text, " {{{}}}", attributes.join(", "));
    }
    text
}

fn position(position: Option<Position>) -> String {
    position.map_or_else(|| "?".to_owned(), |position| position.to_string())
}
