//! Reads the Rust files in a directory tree: the packages, the files in each package, and the
//! purpose of each line.

use std::collections::BTreeMap;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};

use proc_macro2::extra::invalidate_current_thread_spans;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use walkdir::WalkDir;

use super::lexical::Text;
use crate::Failure;

/// Purpose of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    Product,
    Test,
    Generated,
}

/// Directories that contain test code, at any level of the tree.
const TEST_DIRECTORIES: &[&str] = &[
    "tests", "test", "testing", "testkit", "benches", "examples", "fuzz",
];

/// A package, or a source directory without a manifest.
pub(crate) struct Package {
    /// Directory relative to the root of the tree. For the root package, this is the name of the
    /// tree.
    pub(crate) name: String,
    pub(crate) manifest: toml::Table,
    pub(crate) sources: Vec<Source>,
    /// Files that can't be parsed, and the error for each.
    pub(crate) unreadable: Vec<String>,
}

/// A parsed source file in a package.
pub(crate) struct Source {
    /// Path relative to the root of the tree.
    pub(crate) path: PathBuf,
    /// Module path, if this file is part of a crate in its package.
    pub(crate) module: Option<Module>,
    pub(crate) text: Text,
    pub(crate) syntax: syn::File,
    purpose: Purpose,
    /// Lines with test code in a product file.
    tests: Vec<RangeInclusive<usize>>,
}

/// A module in a crate.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Module {
    /// Path of the crate root, relative to the root of the tree.
    pub(crate) root: PathBuf,
    /// Module path, starting at the crate root.
    pub(crate) path: Vec<String>,
}

impl Source {
    /// Returns the purpose of a line. Line numbers start at 1.
    pub(crate) fn purpose_of(&self, line: usize) -> Purpose {
        if self.tests.iter().any(|range| range.contains(&line)) {
            return Purpose::Test;
        }
        self.purpose
    }

    pub(crate) fn purpose(&self) -> Purpose {
        self.purpose
    }
}

/// Reads all source files in a directory. If a file is not valid Rust, such as a template, it's
/// returned as an error message.
pub(crate) fn read(root: &Path) -> Result<Vec<Package>, Failure> {
    // Free the spans of previous trees, because they only use memory.
    invalidate_current_thread_spans();
    let (mut manifests, mut files) = (BTreeMap::new(), Vec::new());
    for path in paths(root)? {
        if path.file_name().is_some_and(|name| name == "Cargo.toml") {
            let manifest: toml::Table = fs::read_to_string(root.join(&path))?
                .parse()
                .map_err(|e| format!("{}: {e}", path.display()))?;
            if manifest.contains_key("package") {
                manifests.insert(path.parent().unwrap_or(&path).to_owned(), manifest);
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    let mut owned = BTreeMap::<PathBuf, Vec<PathBuf>>::new();
    for file in files {
        // Use the nearest parent directory with a manifest, because packages can be nested.
        let owner = file.ancestors().find(|a| manifests.contains_key(*a));
        let owner = owner.unwrap_or(Path::new("")).to_owned();
        owned.entry(owner).or_default().push(file);
    }
    let own_name = fs::canonicalize(root)?;
    let own_name = own_name.file_name().unwrap_or_default().to_string_lossy();
    let packages = owned.into_iter().map(|(directory, files)| {
        let mut package = Package {
            name: match directory.to_string_lossy() {
                name if name.is_empty() => own_name.to_string(),
                name => name.to_string(),
            },
            manifest: manifests.remove(&directory).unwrap_or_default(),
            sources: Vec::new(),
            unreadable: Vec::new(),
        };
        package.read(root, &files);
        package
    });
    Ok(packages.collect())
}

/// Returns all files in a tree as relative paths. Hidden files and build output are skipped.
pub(crate) fn paths(root: &Path) -> Result<Vec<PathBuf>, Failure> {
    let is_wanted = |entry: &walkdir::DirEntry| {
        let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
        let is_output = entry.path().join("CACHEDIR.TAG").exists();
        entry.depth() == 0 || !(is_hidden || is_output)
    };
    let mut paths = Vec::new();
    for entry in WalkDir::new(root)
        .sort_by_file_name()
        .into_iter()
        .filter_entry(is_wanted)
    {
        let entry = entry?;
        if entry.file_type().is_file() {
            paths.push(entry.path().strip_prefix(root)?.to_owned());
        }
    }
    Ok(paths)
}

impl Package {
    fn read(&mut self, root: &Path, files: &[PathBuf]) {
        let mut tests = Vec::new();
        for path in files {
            let (source, text, syntax) = match parsed(&root.join(path)) {
                Ok(parsed) => parsed,
                Err(e) => {
                    self.unreadable.push(format!("{}: {e}", path.display()));
                    continue;
                }
            };
            // We need to use the syntax, because `#[cfg(test)]` can be used for a module, a
            // function or a single import.
            let mut items = Items::default();
            items.visit_file(&syntax);
            let directory = module_directory(path);
            tests.extend(
                items
                    .modules
                    .iter()
                    .map(|name| normal(&directory.join(name))),
            );
            // A module of the product may have the name of a directory for tests.
            let module = module(path, files);
            let is_test = is_in_test_directory(module.as_ref().map_or(path, |module| &module.root));
            self.sources.push(Source {
                path: path.clone(),
                module,
                text,
                syntax,
                purpose: match (is_generated(path, &source), is_test) {
                    (true, _) => Purpose::Generated,
                    (false, true) => Purpose::Test,
                    (false, false) => Purpose::Product,
                },
                tests: items.tests,
            });
        }
        // Files of modules that were declared for tests in another file.
        for source in &mut self.sources {
            let path = source.path.with_extension("");
            let is_test = tests.iter().any(|test| path.starts_with(test));
            if is_test && source.purpose == Purpose::Product {
                source.purpose = Purpose::Test;
            }
        }
    }
}

/// Returns the module of a file, based on its path: the crate root is in the nearest directory that
/// has one.
fn module(path: &Path, files: &[PathBuf]) -> Option<Module> {
    let root_in = |directory: &Path| {
        let mut roots = ["lib.rs", "main.rs"]
            .map(|name| directory.join(name))
            .into_iter();
        roots.find(|root| files.contains(root))
    };
    let is_root = path.ends_with("main.rs") || path.parent()?.ends_with("src/bin");
    let root = match is_root {
        true => path.to_owned(),
        false => path.ancestors().skip(1).find_map(root_in)?,
    };
    let below = path.strip_prefix(root.parent()?).ok()?.with_extension("");
    let names = below.iter().map(|name| name.to_string_lossy().into_owned());
    let mut names: Vec<_> = names.collect();
    if path == root {
        names.clear();
    }
    names.pop_if(|last| last == "mod");
    Some(Module { root, path: names })
}

fn module_directory(path: &Path) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default();
    let parent = path.parent().unwrap_or(Path::new(""));
    match ["lib", "main", "mod"].iter().any(|name| stem == *name) {
        true => parent.to_owned(),
        false => parent.join(stem),
    }
}

fn parsed(path: &Path) -> Result<(String, Text, syn::File), Failure> {
    let source = fs::read_to_string(path)?;
    let plain = source.trim_start_matches('\u{feff}');
    let (text, tokens) = Text::new(plain)?;
    let syntax = syn::parse2(tokens)?;
    Ok((source, text, syntax))
}

/// Test code in a file.
#[derive(Default)]
struct Items {
    tests: Vec<RangeInclusive<usize>>,
    /// Test modules in other files, relative to the directory of this file's modules.
    modules: Vec<PathBuf>,
    is_in_test: bool,
}

impl Items {
    /// Visits an item. If its attributes are for tests, the lines are added as test code.
    fn enter(
        &mut self,
        attributes: &[syn::Attribute],
        lines: RangeInclusive<usize>,
        visit: impl FnOnce(&mut Self),
    ) {
        let before = self.is_in_test;
        if !before && attributes.iter().any(is_for_tests) {
            self.is_in_test = true;
            self.tests.push(lines);
        }
        visit(self);
        self.is_in_test = before;
    }
}

impl<'ast> Visit<'ast> for Items {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        self.enter(attributes(item), lines(item), |items| {
            visit::visit_item(items, item);
        });
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.enter(&item.attrs, lines(item), |items| {
            visit::visit_impl_item_fn(items, item);
        });
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if item.content.is_none() && self.is_in_test {
            let file = item.attrs.iter().find_map(named_file);
            // A `path` attribute is relative to the directory of the file.
            let module = file.map(|file| Path::new("..").join(file).with_extension(""));
            self.modules
                .push(module.unwrap_or_else(|| item.ident.to_string().into()));
        }
        visit::visit_item_mod(self, item);
    }
}

fn named_file(attribute: &syn::Attribute) -> Option<String> {
    let value = &attribute.meta.require_name_value().ok()?.value;
    match value {
        syn::Expr::Lit(syn::ExprLit {
            lit: syn::Lit::Str(file),
            ..
        }) if attribute.path().is_ident("path") => Some(file.value()),
        _ => None,
    }
}

/// Returns the lines of a node, including its attributes and documentation.
pub(crate) fn lines(node: &impl Spanned) -> RangeInclusive<usize> {
    let span = node.span();
    span.start().line..=span.end().line
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    use syn::Item;
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Checks for any variant of `#[test]`, and for `#[cfg(test)]`. A condition that contains `not`
/// could be true for the product.
fn is_for_tests(attribute: &syn::Attribute) -> bool {
    let path = attribute.path();
    if path
        .segments
        .last()
        .is_some_and(|last| last.ident == "test")
    {
        return true;
    }
    let condition = match &attribute.meta {
        syn::Meta::List(list) if path.is_ident("cfg") => list.tokens.to_string(),
        _ => return false,
    };
    let has = |name| {
        let mut words = condition.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        words.any(|word| word == name)
    };
    has("test") && !has("not")
}

fn is_in_test_directory(path: &Path) -> bool {
    let parts = path.components().map(Component::as_os_str);
    let mut parts = parts.filter_map(|part| part.to_str());
    parts.any(|part| TEST_DIRECTORIES.contains(&part))
}

fn is_generated(path: &Path, source: &str) -> bool {
    let head = source.lines().take(3).collect::<String>().to_lowercase();
    let is_in_directory = path.components().any(|c| c.as_os_str() == "generated");
    is_in_directory
        || ["generated by", "@generated"]
            .iter()
            .any(|mark| head.contains(mark))
}

/// Returns a path without `..` components.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::sh::Scratch;

    pub(crate) fn tree(name: &str, files: &[(&str, &str)]) -> Vec<Package> {
        let scratch = Scratch::new(name).unwrap();
        for (path, text) in files {
            let path = scratch.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        read(scratch.path()).unwrap()
    }

    #[test]
    fn non_rust_files_are_reported() {
        let packages = tree(
            "tidy-unreadable",
            &[("src/lib.rs", "mod one;\n"), ("src/one.rs", "fn {{name}}")],
        );
        let [package] = &packages[..] else {
            panic!("{} packages", packages.len());
        };
        assert_eq!(package.sources.len(), 1);
        let [message] = &package.unreadable[..] else {
            panic!("{:?}", package.unreadable);
        };
        assert!(message.starts_with("src/one.rs: "), "{message}");
    }

    #[test]
    fn files_are_read_along_their_modules() {
        let manifest = "[package]\nname = \"a\"\n";
        let packages = tree(
            "tidy-sources",
            &[
                ("Cargo.toml", manifest),
                ("src/lib.rs", "mod one;\n#[cfg(test)]\nmod checks;\n"),
                (
                    "src/one/mod.rs",
                    "mod inner;\nmod inline { mod deep; }\n#[cfg(test)]\nmod more;\n",
                ),
                ("src/one/more/mod.rs", ""),
                ("src/one/more/deep.rs", ""),
                (
                    "src/one/inner.rs",
                    "fn f() {}\n#[cfg(test)]\nmod tests {\n    #[test]\n    fn g() {}\n}\n",
                ),
                ("src/one/inline/deep.rs", "// @generated\n"),
                (
                    "src/odd.rs",
                    "#[cfg(test)]\n#[path = \"odd_tests.rs\"]\nmod tests;\n",
                ),
                ("src/odd_tests.rs", ""),
                ("src/checks.rs", ""),
                ("tests/a.rs", ""),
                (".build/x.rs", ""),
                ("other/Cargo.toml", manifest),
                ("other/main.rs", "#[cfg(not(test))]\nfn f() {}\n"),
            ],
        );
        let shown = |package: &Package| -> Vec<_> {
            let sources = package.sources.iter();
            let shown = sources.map(|s| {
                let module = s.module.as_ref().map(|module| module.path.join("::"));
                (s.path.to_str().unwrap().to_owned(), module, s.purpose)
            });
            shown.collect()
        };
        use Purpose::{Generated, Product, Test};
        let expected = |path: &str, module: Option<&str>, purpose| {
            (path.to_owned(), module.map(str::to_owned), purpose)
        };
        assert_eq!(
            shown(&packages[0]),
            [
                expected("src/checks.rs", Some("checks"), Test),
                expected("src/lib.rs", Some(""), Product),
                expected("src/odd.rs", Some("odd"), Product),
                expected("src/odd_tests.rs", Some("odd_tests"), Test),
                expected(
                    "src/one/inline/deep.rs",
                    Some("one::inline::deep"),
                    Generated
                ),
                expected("src/one/inner.rs", Some("one::inner"), Product),
                expected("src/one/mod.rs", Some("one"), Product),
                expected("src/one/more/deep.rs", Some("one::more::deep"), Test),
                expected("src/one/more/mod.rs", Some("one::more"), Test),
                expected("tests/a.rs", None, Test),
            ]
        );
        assert_eq!(packages[1].name, "other");
        assert_eq!(shown(&packages[1])[0].2, Product);
        let inner = &packages[0].sources[5];
        assert_eq!(inner.purpose_of(1), Product);
        assert_eq!(inner.purpose_of(2), Test);
        assert_eq!(inner.purpose_of(6), Test);
        assert_eq!(packages[1].sources[0].purpose_of(2), Product);
    }
}
