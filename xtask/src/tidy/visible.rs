//! User-visible text: messages, help, schema descriptions, documents and deployed files.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use syn::visit::Visit;

use super::lexical::{Kind, Remark};
use super::sources::{self, Package, Purpose, Source};
use crate::Failure;

/// Documents in the root directory.
const DOCUMENTS: &[&str] = &["README.md", "CHANGELOG.md", "SECURITY.md"];

/// Directories that only contain text for users.
const DIRECTORIES: &[&str] = &["docs", "deploy", "xtask/cases"];

/// Derive macros that use doc comments to generate help, manual pages or a schema.
const DERIVES: &[&str] = &["Args", "JsonSchema", "Parser", "Subcommand", "ValueEnum"];

/// A text and the file that contains it.
pub(crate) struct Visible {
    pub(crate) path: PathBuf,
    pub(crate) text: Remark,
}

pub(crate) fn texts(root: &Path, packages: &[Package]) -> Result<Vec<Visible>, Failure> {
    let mut texts = Vec::new();
    for source in packages.iter().flat_map(|package| &package.sources) {
        let own = literals(source).chain(described(source));
        let product = own.filter(|text| source.purpose_of(text.line) == Purpose::Product);
        texts.extend(product.map(|text| Visible {
            path: source.path.clone(),
            text,
        }));
    }
    for path in sources::paths(root)?.into_iter().filter(|p| is_document(p)) {
        match fs::read_to_string(root.join(&path)) {
            Ok(text) => {
                let text = Remark::new(1, text);
                texts.push(Visible { path, text });
            }
            // Ignore binary files such as images.
            Err(e) if e.kind() == ErrorKind::InvalidData => {}
            Err(e) => return Err(format!("{}: {e}", path.display()).into()),
        }
    }
    Ok(texts)
}

fn is_document(path: &Path) -> bool {
    let is_page = path.extension().is_some_and(|e| e == "html");
    let is_below = DIRECTORIES
        .iter()
        .any(|directory| path.starts_with(directory));
    is_page || is_below || DOCUMENTS.iter().any(|name| path == Path::new(name))
}

/// Returns all string literals. Escape sequences are replaced by whitespace.
fn literals(source: &Source) -> impl Iterator<Item = Remark> {
    source.text.tokens.iter().filter_map(|token| {
        let Kind::Literal(literal) = &token.kind else {
            return None;
        };
        let text = literal.trim_start_matches(['b', 'c', 'r', '#']);
        let text = text.strip_prefix('"')?;
        let mut plain = String::new();
        let mut chars = text.chars();
        while let Some(c) = chars.next() {
            plain.push(c);
            if c == '\\' {
                let escaped = chars.next();
                plain.push(if escaped == Some('\n') { '\n' } else { ' ' });
            }
        }
        Some(Remark::new(token.line, plain))
    })
}

/// Returns the documentation of types that derive help or a schema, including fields and variants.
fn described(source: &Source) -> impl Iterator<Item = Remark> {
    let mut types = Types(Vec::new());
    types.visit_file(&source.syntax);
    let is_within = move |doc: &&Remark| types.0.iter().any(|lines| lines.contains(&doc.line));
    source.text.docs.iter().filter(is_within).cloned()
}

/// Lines of types with user-visible documentation.
struct Types(Vec<std::ops::RangeInclusive<usize>>);

impl<'ast> Visit<'ast> for Types {
    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        if item.attrs.iter().any(derives_help) {
            self.0.push(sources::lines(item));
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        if item.attrs.iter().any(derives_help) {
            self.0.push(sources::lines(item));
        }
    }
}

fn derives_help(attribute: &syn::Attribute) -> bool {
    let syn::Meta::List(list) = &attribute.meta else {
        return false;
    };
    let derives = list.tokens.to_string();
    let mut names = derives.split(|c: char| !c.is_alphanumeric());
    attribute.path().is_ident("derive") && names.any(|name| DERIVES.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::tests::tree;

    #[test]
    fn visible_text_includes_literals_and_help() {
        let source = "/// Not seen.\n#[derive(Clone)]\nstruct A;\n/// Seen A.\n#[derive(Clone, clap::Args)]\nstruct B {\n    \
                      /// Seen B.\n    b: u8,\n}\nfn f() {\n    // Not seen.\n    g(\"Seen\\nC \\\n       D\", 'c', 7);\n}\n\
                      #[cfg(test)]\nmod tests { fn t() { g(\"not seen\"); } }\n";
        let packages = tree("tidy-visible", &[("src/lib.rs", source)]);
        let root = crate::sh::Scratch::new("tidy-visible-root").unwrap();
        let seen = texts(root.path(), &packages).unwrap();
        let seen: Vec<_> = seen.iter().map(|t| (t.text.line, &*t.text.text)).collect();
        assert_eq!(
            seen,
            [
                (12, "Seen\\ C \\\n       D\""),
                (4, " Seen A."),
                (7, " Seen B.")
            ]
        );
    }

    #[test]
    fn documents_are_user_visible() {
        for (path, expected) in [
            ("README.md", true),
            ("docs/en/install.md", true),
            ("deploy/systemd/riserd.service", true),
            ("target/src/control/page.html", true),
            ("CONTRIBUTING.md", false),
            ("tests/data/README.md", false),
        ] {
            assert_eq!(is_document(Path::new(path)), expected, "{path}");
        }
    }
}
