//! Kinds of commands, for those who count them.

/// What a command is about, roughly.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Blocks are read.
    Read,
    /// Blocks are written, their own data or repeated ones.
    Write,
    /// What was written is made durable.
    Flush,
    /// Blocks are given back.
    Unmap,
    /// Blocks are compared or verified.
    Compare,
    /// Everything that is not about blocks, and what we do not know.
    Other,
}

/// The kind of each operation code.
static KINDS: [Kind; 256] = {
    let mut kinds = [Kind::Other; 256];
    let known: [(&[u8], Kind); 5] = [
        // READ (6), (10), (12), (16).
        (&[0x08, 0x28, 0xa8, 0x88], Kind::Read),
        // WRITE (6), (10), (12), (16), ATOMIC (16); AND VERIFY (10), (12), (16); WRITE SAME (10), (16);
        // ORWRITE.
        (
            &[
                0x0a, 0x2a, 0xaa, 0x8a, 0x9c, 0x2e, 0xae, 0x8e, 0x41, 0x93, 0x8b,
            ],
            Kind::Write,
        ),
        // SYNCHRONIZE CACHE (10), (16).
        (&[0x35, 0x91], Kind::Flush),
        (&[0x42], Kind::Unmap),
        // COMPARE AND WRITE; VERIFY (10), (12), (16).
        (&[0x89, 0x2f, 0xaf, 0x8f], Kind::Compare),
    ];
    let mut row = 0;
    while row < known.len() {
        let (codes, kind) = known[row];
        let mut n = 0;
        while n < codes.len() {
            kinds[codes[n] as usize] = kind;
            n += 1;
        }
        row += 1;
    }
    kinds
};

impl Kind {
    /// The kind of a CDB's command.
    #[must_use]
    pub fn of(cdb: &[u8]) -> Self {
        cdb.first()
            .map_or(Self::Other, |&code| KINDS[usize::from(code)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::opcode::TABLE;

    #[test]
    fn commands_are_of_the_kind_that_their_names_say() {
        for row in &TABLE {
            let name = row.name;
            let kind = match name.split([' ', '(']).next().unwrap() {
                "READ" if name.starts_with("READ (") => Kind::Read,
                "WRITE" | "ORWRITE" => Kind::Write,
                "SYNCHRONIZE" => Kind::Flush,
                "UNMAP" => Kind::Unmap,
                "COMPARE" | "VERIFY" => Kind::Compare,
                _ => Kind::Other,
            };
            assert_eq!(Kind::of(row.usage), kind, "{name}");
        }
        assert_eq!(Kind::of(&[]), Kind::Other);
    }
}
