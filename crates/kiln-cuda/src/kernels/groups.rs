//! Instructions of a group of four warps (`wgmma`, capability 9.0), as functions of a case.

use std::fmt::Write as _;

/// Where the left operand is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Left {
    /// In shared memory.
    Shared,
    /// In four registers of a thread.
    Registers,
}

/// A product of 64 rows and sixteen steps of the depth, whose operands are all sums of a thread.
pub struct Instruction<'a> {
    /// The function that it becomes: of sums, left operand, right operand (in shared memory), and whether it
    /// adds to the sums.
    pub name: &'a str,
    /// Columns of the right operand.
    pub columns: usize,
    /// `bf16` or `f16`.
    pub element: &'a str,
    /// The declaration of the sums as a parameter.
    pub sums: &'a str,
    /// One of them.
    pub sum: &'a dyn Fn(usize) -> String,
    /// Where the left operand is.
    pub left: Left,
    /// Constants that say whether operands in shared memory are turned, the left one first.
    pub turned: &'a [&'a str],
}

/// What `each` gives for the first `count` numbers, with commas.
pub fn list(count: usize, each: impl Fn(usize) -> String) -> String {
    (0..count).map(each).collect::<Vec<_>>().join(", ")
}

impl Instruction<'_> {
    /// The sums as operands that are read and written.
    pub fn operands(&self) -> String {
        list(self.columns / 2, |sum| format!("\"+f\"({})", (self.sum)(sum)))
    }

    /// The function.
    pub fn text(&self) -> String {
        let Self {
            name,
            columns,
            element,
            sums,
            turned,
            ..
        } = self;
        let count = columns / 2;
        let places = list(count, |sum| format!("%{sum}"));
        let (parameter, words, given) = match self.left {
            Left::Shared => ("kiln_u64 left", 1, "\"l\"(left)".to_owned()),
            Left::Registers => {
                let given = list(4, |word| format!("\"r\"(left[{word}])"));
                ("const kiln_u32 (&left)[4]", 4, given)
            }
        };
        let left = list(words, |word| format!("%{}", count + word));
        let left = if words > 1 { format!("{{{left}}}") } else { left };
        let right = count + words;
        let ways = list(turned.len(), |operand| format!("%{}", right + 2 + operand));
        let constants = list(turned.len(), |operand| format!("\"n\"((int){})", turned[operand]));
        let mut text = String::new();
        let _ = write!(
            text,
            "static void {name}({sums}, {parameter}, kiln_u64 right, int add)\n{{\nasm volatile(\
             \"{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{}, 0;\\n\"\n\
             \"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element} {{{places}}}, {left}, %{right}, adds, 1, 1, \
             {ways};\\n}}\"\n\
             : {} : {given}, \"l\"(right), \"r\"(add), {constants});\n}}\n",
            right + 1,
            self.operands(),
        );
        text
    }
}
