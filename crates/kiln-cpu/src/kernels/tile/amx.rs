//! Register tiles of AMX: one instruction multiplies a tile of 16 rows of A, each with 16 pairs of bf16 along
//! the depth, with a tile of 16 such steps of B, each with 16 columns, and adds the products to a tile of 16
//! x 16 sums of f32.
//!
//! ```text
//!        16 pairs            16 columns
//!   A  ┌──────────┐     B  ┌──────────┐
//!   16 │ a00 a01 ..│    16 │ b00 b10 ..│   pair (0, 0) of B holds elements (0, 0) and (1, 0)
//! rows │ a10 a11 ..│ steps │ b20 b30 ..│
//!      └──────────┘        └──────────┘
//! ```
//!
//! A processor has eight tiles: four hold the sums of 32 rows by 32 columns, two A and two B. Each step of
//! the loop loads four tiles for four multiplications: a tile of the next step as soon as the last
//! multiplication that needs the old one is on its way. A multiplication takes 16 cycles, a load from L1 8
//! and from L2 16, beside each other but for about 4 cycles of each load. From beyond L2 a load takes 130
//! cycles.
//!
//! Measured on one thread with a core of its own, for a step of four multiplications and four loads: 17.5 ns
//! without loads, 22 with all operands in L1, 27 with A in L1 and B in L2 and loaded by `tileloaddt1`, which
//! leaves A in L1, 36 by plain loads, 38 to 40 with both in L2. So where threads have cores of their own, B
//! [passes by](Access::Passing), and lines of what the next chunk of the depth needs are brought to L2 after
//! each multiplication (all at once they cost more than they save).
//!
//! Where other hardware threads work on the same cores, four multiplications alone take 60 to 75 ns and with
//! their loads 105 to 120 in any order. There panels of the whole depth meet, and tiles are brought to L1 two
//! steps before: ten products of 16 virtual processors took 1.2 times as long without, and in chunks that
//! pass by, too. Half of the threads reach half of what all do, so it is no use to leave some idle.
//!
//! Tried on those ten products, within 0.9 to 1.1 of the time: tiles prefetched three and four steps ahead,
//! more of L2 for panels that stay, and shares that are many small blocks in a row. Packing panels twice or
//! running the epilogue twice takes 1 to 5 % longer there, so neither is what products wait for.
//!
//! What is left of a product beside its multiplications: of [1024, 1024] · [1024, 1024] on one thread 83 of 100
//! samples are in the function below, 5 each in packing A, in packing B and in the epilogue. With operands and
//! sums where a product has them (A in L1, B in L2, sums loaded and stored for each chunk) a loop of nothing
//! else reaches 0.52 of what registers alone do, 0.57 without the sums, in chunks of 8, 11, 16 and 32 steps,
//! with B passing by or not; oneDNN 2.7 reaches 0.24 to 0.39 for ten such products there, and 0.26 to 0.47
//! with B packed before. A unit that another hardware thread shares is half as fast, and hides all loads.
//!
//! Both panels are cut into blocks of 16 steps. A block of A has its rows one after the other, a block of B
//! its tiles, so that a tile is 16 consecutive lines. All tiles have one form, which is set once for each
//! part of a kernel; a product pads its panels with zeros to whole tiles.
//!
//! The C functions are in `kiln_vector.h`. Where the compiler does not know AMX they keep the tiles in
//! memory, so that generated sources can be tested on any machine with pairs of bf16.

use super::super::{Helper, indent};
use super::{Access, Tile};
use crate::policy::BLOCK_PANELS;

/// Rows, columns and steps of the depth of a tile.
pub const EXTENT: usize = 16;

/// Most tiles of rows, and of columns, whose sums fit the processor beside operands.
const MOST: usize = 2;

/// Most rows of a panel of A.
pub const MAX_ROWS: usize = MOST * EXTENT;

/// Lines that each step of a multiplication brings of what follows of an operand with so many tiles: all of
/// its lines, with all the multiplications of a block.
pub const fn lines_ahead(tiles: usize) -> usize {
    tiles * EXTENT / BLOCK_PANELS
}

/// Statement before the first tile of a part of a kernel.
pub const BEGIN: &str = "kiln_tiles_begin();\n";

/// Statement after its last tile: the operating system need not save tiles any more.
pub const END: &str = "kiln_tiles_end();\n";

/// [`BEGIN`] and [`END`], or nothing where no tiles are multiplied.
pub const fn around(tiles: bool) -> [&'static str; 2] {
    match tiles {
        true => [BEGIN, END],
        false => ["", ""],
    }
}

/// Pairs of a tile.
const TILE: usize = EXTENT * EXTENT;

/// Name and text of the function of `tile`, of 16 or 32 rows and one or two vectors. The arguments are those
/// of [`Tile::helper`]; `depth` is a multiple of 16, but not zero. Where B passes by, two more say which
/// lines of the operands are needed later: [`lines_ahead`] of each for each step.
pub(super) fn helper(tile: &Tile) -> Helper {
    let (high, wide) = (tile.rows / EXTENT, tile.vectors);
    let passing = tile.b == Access::Passing;
    debug_assert!((1..=MOST).contains(&high) && (1..=MOST).contains(&wide) && !tile.nested);
    debug_assert!(tile.a == Access::Packed && (passing || tile.b == Access::Packed));
    let name = tile.name();
    let head = format!(
        "void {name}(const bf16_pair *a, const bf16_pair *b, int64_t depth, float *c, int64_t ldc, int accumulate{})",
        match passing {
            true => ", const bf16_pair *next_a, const bf16_pair *next_b",
            false => "",
        }
    );
    let step = Step { high, wide, passing };
    let sums = Sums { high, wide };
    let body = format!(
        "{}{}for (int64_t k = {EXTENT}; k < depth; k += {EXTENT}) {{\n{}}}\n{}{}",
        sums.begin(),
        step.first(),
        indent(&(step.next() + &step.advance()), 4),
        step.last(),
        sums.store(),
    );
    function(name, &head, &body)
}

/// A function of this head and body.
fn function(name: String, head: &str, body: &str) -> Helper {
    Helper {
        name,
        prototype: format!("{head};"),
        definition: format!("{head} {{\n{}}}\n", indent(body, 4)),
    }
}

/// The function of 32 rows of A that lie in memory, and of one or two vectors of columns of a packed B, added
/// up over several products that find A elsewhere:
///
/// ```c
/// void name(const bf16_pair *a, int64_t lda, const int64_t *moves, int64_t count, int64_t steps,
///           const bf16_pair *b, float *c, int64_t ldc);
/// ```
/// Product number `t` of `count` multiplies rows from `a + moves[t]` on, `lda` pairs apart, in `steps` steps
/// of 16 pairs. B has its products, and their steps, one after the other, and [passes by](Access::Passing) or
/// is brought to L1 two steps before.
pub fn moved(wide: usize, passing: bool) -> Helper {
    debug_assert!((1..=MOST).contains(&wide));
    let name = format!(
        "kiln_tile_amx_moved_{MAX_ROWS}x{wide}{}",
        if passing { "_t" } else { "" }
    );
    let head = format!(
        "void {name}(const bf16_pair *a, int64_t lda, const int64_t *moves, int64_t count, int64_t steps, const bf16_pair *b, float *c, int64_t ldc)"
    );
    let sums = Sums { high: MOST, wide };
    let row = |i: usize, register| format!("kiln_tile_load({register}, at + {} * lda, lda);\n", i * EXTENT);
    let column = |j: usize, register| {
        let place = j * TILE;
        match passing {
            true => format!("kiln_tile_stream({register}, b + {place}, {EXTENT});\n"),
            false => format!(
                "kiln_tile_load({register}, b + {place}, {EXTENT});\nkiln_tile_to_l1(b + {}, {EXTENT});\n",
                2 * wide * TILE + place
            ),
        }
    };
    let body = format!(
        "{}for (int64_t t = 0; t < count; t++) {{\n    const bf16_pair *at = a + moves[t];\n    for (int64_t k = 0; k < steps; k++, at += {EXTENT}, b += {}) {{\n{}    }}\n}}\n{}",
        sums.zero(),
        wide * TILE,
        indent(&sums.step(&row, &column), 8),
        sums.store(),
    );
    function(name, &head, &body)
}

/// The function of 32 rows of a packed A and of two tiles of columns of B, `apart` pairs from each other,
/// each with its steps one after the other:
///
/// ```c
/// void name(const bf16_pair *a, const bf16_pair *b, int64_t apart, int64_t depth, float *c, int64_t ldc, int accumulate);
/// ```
pub fn beside() -> Helper {
    let name = format!("kiln_tile_amx_beside_{MAX_ROWS}x{MOST}");
    let head = format!(
        "void {name}(const bf16_pair *a, const bf16_pair *b, int64_t apart, int64_t depth, float *c, int64_t ldc, int accumulate)"
    );
    let sums = Sums {
        high: MOST,
        wide: MOST,
    };
    let row = |i: usize, register| format!("kiln_tile_stream({register}, a + {}, {EXTENT});\n", i * TILE);
    let column = |j: usize, register| format!("kiln_tile_load({register}, b + {j} * apart, {EXTENT});\n");
    let body = format!(
        "{}for (int64_t k = 0; k < depth; k += {EXTENT}, a += {}, b += {TILE}) {{\n{}}}\n{}",
        sums.begin(),
        MOST * TILE,
        indent(&sums.step(&row, &column), 4),
        sums.store(),
    );
    function(name, &head, &body)
}

/// The function of 32 rows of A and of 16 or 32 columns of B, which lie in memory as rows of pairs, `lda` and
/// `ldb` pairs apart:
///
/// ```c
/// void name(const bf16_pair *a, int64_t lda, const bf16_pair *b, int64_t ldb, int64_t depth, float *c, int64_t ldc, int accumulate);
/// ```
/// `depth` is a multiple of 16, and may be zero.
pub fn rows(wide: usize) -> Helper {
    debug_assert!((1..=MOST).contains(&wide));
    let name = format!("kiln_tile_amx_rows_{MAX_ROWS}x{wide}");
    let head = format!(
        "void {name}(const bf16_pair *a, int64_t lda, const bf16_pair *b, int64_t ldb, int64_t depth, float *c, int64_t ldc, int accumulate)"
    );
    let sums = Sums { high: MOST, wide };
    let row = |i: usize, register| format!("kiln_tile_load({register}, a + {} * lda, lda);\n", i * EXTENT);
    let column = |j: usize, register| format!("kiln_tile_load({register}, b + {}, ldb);\n", j * EXTENT);
    let body = format!(
        "{}for (int64_t k = 0; k < depth; k += {EXTENT}, a += {EXTENT}, b += {EXTENT} * ldb) {{\n{}}}\n{}",
        sums.begin(),
        indent(&sums.step(&row, &column), 4),
        sums.store(),
    );
    function(name, &head, &body)
}

/// The sums of a function, `high` by `wide` tiles in the registers from 0 on.
#[derive(Clone, Copy)]
struct Sums {
    high: usize,
    wide: usize,
}

impl Sums {
    /// The texts that `template` makes of register, first row and first column of each.
    fn each(self, template: impl Fn(usize, usize, usize) -> String) -> String {
        let all = (0..self.high).flat_map(|i| (0..self.wide).map(move |j| (i, j)));
        all.map(|(i, j)| template(i * self.wide + j, i * EXTENT, j * EXTENT))
            .collect()
    }

    fn zero(self) -> String {
        self.each(|sum, _, _| format!("kiln_tile_zero({sum});\n"))
    }

    /// What `c` holds if `accumulate` says so, or zeros.
    fn begin(self) -> String {
        let load = self.each(|sum, i, j| format!("kiln_tile_load({sum}, c + {i} * ldc + {j}, ldc);\n"));
        format!(
            "if (accumulate) {{\n{}}} else {{\n{}}}\n",
            indent(&load, 4),
            indent(&self.zero(), 4)
        )
    }

    fn store(self) -> String {
        self.each(|sum, i, j| format!("kiln_tile_store({sum}, c + {i} * ldc + {j}, ldc);\n"))
    }

    fn dot(self, i: usize, j: usize) -> String {
        let [a, b] = [Operand::A(i), Operand::B(j)].map(Step::register);
        format!("kiln_tile_dot({}, {a}, {b});\n", i * self.wide + j)
    }

    /// The multiplications of a step, each operand loaded right before its first use: `row` and `column` load
    /// tiles of A and B into a register.
    fn step(self, row: &dyn Fn(usize, usize) -> String, column: &dyn Fn(usize, usize) -> String) -> String {
        let mut text = String::new();
        for j in 0..self.wide {
            text.push_str(&column(j, Step::register(Operand::B(j))));
            for i in 0..self.high {
                if j == 0 {
                    text.push_str(&row(i, Step::register(Operand::A(i))));
                }
                text.push_str(&self.dot(i, j));
            }
        }
        text
    }
}

/// The statements of a step of 16 pairs, of `high` tiles of A and `wide` tiles of B.
struct Step {
    high: usize,
    wide: usize,
    /// Whether B passes by, and the lines that are needed later are named.
    passing: bool,
}

/// A tile of an operand.
#[derive(Clone, Copy)]
enum Operand {
    A(usize),
    B(usize),
}

impl Step {
    /// The registers 4 and 5 hold A, 6 and 7 hold B.
    fn register(operand: Operand) -> usize {
        match operand {
            Operand::A(i) => 4 + i,
            Operand::B(j) => 4 + MOST + j,
        }
    }

    /// C expression of the place of a tile, so many steps from the present one.
    fn place(&self, operand: Operand, steps: usize) -> String {
        match operand {
            Operand::A(i) => format!("a + {}", (steps * self.high + i) * TILE),
            Operand::B(j) => format!("b + {}", (steps * self.wide + j) * TILE),
        }
    }

    fn load(&self, operand: Operand, steps: usize) -> String {
        let (register, place) = (Self::register(operand), self.place(operand, steps));
        let load = match operand {
            Operand::B(_) if self.passing => "stream",
            _ => "load",
        };
        format!("kiln_tile_{load}({register}, {place}, {EXTENT});\n")
    }

    /// Brings the lines of `next_a` and `next_b` that are this step's, after one of its multiplications.
    fn bring_lines(&self, dot: usize) -> String {
        if !self.passing {
            return String::new();
        }
        let all = [("next_a", self.high), ("next_b", self.wide)];
        let lines = all
            .iter()
            .flat_map(|&(from, tiles)| (0..lines_ahead(tiles)).map(move |line| (from, line)));
        lines
            .enumerate()
            .filter(|(i, _)| i % (self.high * self.wide) == dot)
            .map(|(_, (from, line))| format!("kiln_line_to_l2({from} + {});\n", line * EXTENT))
            .collect()
    }

    fn dot(&self, i: usize, j: usize) -> String {
        let Self { high, wide, .. } = *self;
        Sums { high, wide }.dot(i, j)
    }

    /// All tiles of the first step.
    fn first(&self) -> String {
        let a = (0..self.high).map(Operand::A);
        let all = a.chain((0..self.wide).map(Operand::B));
        all.map(|operand| self.load(operand, 0)).collect()
    }

    /// The multiplications of a step, each followed by the loads of the next step whose registers are free
    /// then.
    ///
    /// They go down the first column of tiles and up the second, so that one operand is free after each but
    /// the first, and two after the last.
    fn next(&self) -> String {
        let mut text = String::new();
        for (at, (j, i)) in self.order().enumerate() {
            text.push_str(&self.dot(i, j));
            text.push_str(&self.bring_lines(at));
            let ends_column = i == if j == 0 { self.high - 1 } else { 0 };
            let row_is_free = j + 1 == self.wide;
            let free = [
                row_is_free.then_some(Operand::A(i)),
                ends_column.then_some(Operand::B(j)),
            ];
            for operand in free.into_iter().flatten() {
                text.push_str(&self.load(operand, 1));
                if !self.passing {
                    let place = self.place(operand, 2);
                    text.push_str(&format!("kiln_tile_to_l1({place}, {EXTENT});\n"));
                }
            }
        }
        text
    }

    /// From a step to the next one.
    fn advance(&self) -> String {
        let (high, wide) = (self.high, self.wide);
        let mut text = format!("a += {};\nb += {};\n", high * TILE, wide * TILE);
        if self.passing {
            let [a, b] = [high, wide].map(|tiles| lines_ahead(tiles) * EXTENT);
            text.push_str(&format!("next_a += {a};\nnext_b += {b};\n"));
        }
        text
    }

    /// The multiplications of the last step.
    fn last(&self) -> String {
        let dots = self.order().enumerate();
        dots.map(|(at, (j, i))| self.dot(i, j) + &self.bring_lines(at))
            .collect()
    }

    /// Column and row of the multiplications in their order.
    fn order(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let high = self.high;
        let row = move |j: usize, i: usize| if j == 0 { i } else { high - 1 - i };
        (0..self.wide).flat_map(move |j| (0..high).map(move |i| (j, row(j, i))))
    }
}
