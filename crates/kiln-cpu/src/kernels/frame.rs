//! The frame that templates write around their own code: the comment and the structure of arguments before
//! it, the heads of its parallel parts, and the kernel's function after it.

use super::{KernelText, Param, fields, finish_kernel, indent, run_part, unpack};

/// The fields that the descriptions of all kernels have.
#[derive(Clone, Copy)]
pub(crate) struct Frame<'a> {
    /// C identifier of the kernel.
    pub name: &'a str,
    /// What it computes.
    pub comment: &'a str,
    /// Its parameters.
    pub params: &'a [Param],
    /// Most threads it may meet.
    pub threads: usize,
}

impl Frame<'_> {
    /// The comment, with `about` on a line of its own, and `struct name_args`: the parameters, `workspace`,
    /// and `more` fields.
    pub fn head(&self, about: &str, more: &str) -> String {
        format!(
            "/* {}\n * {about} */\nstruct {}_args {{\n{}    char *workspace;\n{more}}};\n",
            self.comment,
            self.name,
            fields(self.params)
        )
    }

    /// `name_suffix(ctx, begin, end, thread)`, with the parameters and `args` in scope of `body`. `comment`
    /// may be empty.
    pub fn part(&self, comment: &str, suffix: &str, body: &str) -> String {
        let comment = if comment.is_empty() {
            String::new()
        } else {
            format!("/* {comment} */\n")
        };
        let name = self.name;
        format!(
            "{comment}static void {name}_{suffix}(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct {name}_args *args = ctx;\n    \
             (void)thread;\n{}{}}}\n",
            unpack(self.params),
            indent(body, 4)
        )
    }

    /// The call of a part: shared between threads, unless there is one thread or `serial` says that sharing
    /// does not pay.
    pub fn run(&self, serial: bool) -> impl Fn(&str, usize) -> String + use<> {
        run_part(serial || self.threads == 1)
    }

    /// The kernel around its parts.
    pub fn finish(&self, source: String, calls: &str, workspace: usize) -> KernelText {
        finish_kernel(self.name, self.params, source, calls, workspace)
    }
}
