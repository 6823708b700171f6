//! Finds import cycles between sibling modules.
//!
//! A reference can be a `use` declaration or a path in code or macro arguments. We follow
//! re-exports to find the module that defines the name, so that modules are not hidden if their
//! parent exports their names. References between a module and its children are ignored, because
//! it's normal in Rust to have a type in `mod.rs` and implementations in child modules. Any other
//! reference is an edge between two sibling modules, which we find by following both modules up to
//! the nearest common ancestor.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::sources::{Package, Purpose, Source};

/// Module path, starting at the crate root.
type ModulePath = Vec<String>;

/// Sibling modules that import each other, either directly or indirectly.
pub(crate) struct Circle {
    /// Package and path of the parent module.
    pub(crate) parent: String,
    pub(crate) siblings: BTreeSet<String>,
    /// Edges between the modules.
    pub(crate) arrows: Vec<Arrow>,
}

impl Circle {
    pub(crate) fn name(&self) -> String {
        let siblings: Vec<_> = self.siblings.iter().map(String::as_str).collect();
        format!("{}: {}", self.parent, siblings.join(" "))
    }
}

/// Formats the name, followed by a line for each edge with its first reference.
impl fmt::Display for Circle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())?;
        for arrow in &self.arrows {
            let (from, to, all) = (&arrow.from, &arrow.to, arrow.references.len());
            if let Some(first) = arrow.references.iter().min() {
                write!(f, "\n    {from} → {to} ({all}): {first}")?;
            }
        }
        Ok(())
    }
}

/// All references from one module to a sibling.
pub(crate) struct Arrow {
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) references: Vec<Reference>,
}

/// A reference to an item in another module.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Reference {
    pub(crate) path: PathBuf,
    pub(crate) line: usize,
    /// Path as used in the source. If it's part of a `use` tree, this is the full path.
    pub(crate) names: Vec<String>,
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, names) = (self.path.display(), self.names.join("::"));
        write!(f, "{path}:{}: {names}", self.line)
    }
}

pub(crate) fn circles(package: &Package) -> Vec<Circle> {
    let mut crates = BTreeMap::<&Path, Crate>::new();
    for source in &package.sources {
        if let Some(module) = &source.module {
            let entry = crates.entry(&module.root).or_default();
            entry.add_source(source, module.path.clone());
        }
    }
    crates
        .into_values()
        .flat_map(|own| own.circles(&package.name))
        .collect()
}

/// Modules of a crate.
#[derive(Default)]
struct Crate {
    modules: BTreeMap<ModulePath, Contents>,
}

/// Names and references in a module.
#[derive(Default)]
struct Contents {
    /// Names defined in this module.
    items: HashSet<String>,
    /// Imported names and their full paths.
    imports: HashMap<String, Vec<String>>,
    /// Paths of glob imports.
    globs: Vec<Vec<String>>,
    references: Vec<Reference>,
}

/// Maximum number of re-exports to follow. A longer chain must contain a cycle.
const MAX_STEPS: usize = 16;

impl Crate {
    fn add_source(&mut self, source: &Source, module: ModulePath) {
        self.modules.entry(module.clone()).or_default();
        let mut visitor = Visitor {
            modules: &mut self.modules,
            source,
            module,
        };
        visitor.visit_file(&source.syntax);
    }

    fn circles(&self, package: &str) -> Vec<Circle> {
        // Edges by parent, source and destination.
        let mut arrows = BTreeMap::<ModulePath, BTreeMap<(String, String), Vec<Reference>>>::new();
        for (module, contents) in &self.modules {
            for reference in &contents.references {
                let Some(target) = self.resolve(module, &reference.names, MAX_STEPS) else {
                    continue;
                };
                // The siblings are at the first difference between both paths. If one module
                // contains the other, there is no difference and therefore no edge.
                let pairs = module.iter().zip(&target);
                let common = pairs.take_while(|(a, b)| a == b).count();
                if let (Some(from), Some(to)) = (module.get(common), target.get(common)) {
                    let siblings = arrows.entry(module[..common].to_vec()).or_default();
                    let arrow = siblings.entry((from.clone(), to.clone())).or_default();
                    arrow.push(reference.clone());
                }
            }
        }
        let mut circles = Vec::new();
        for (parent, arrows) in arrows {
            let names: Vec<_> = [package.to_owned()].into_iter().chain(parent).collect();
            for siblings in components(&arrows) {
                let is_within = |(from, to): &(String, String)| {
                    siblings.contains(from) && siblings.contains(to)
                };
                let within = arrows.iter().filter(|(ends, _)| is_within(ends));
                let within = within.map(|((from, to), references)| Arrow {
                    from: from.clone(),
                    to: to.clone(),
                    references: references.clone(),
                });
                circles.push(Circle {
                    parent: names.join("::"),
                    arrows: within.collect(),
                    siblings,
                });
            }
        }
        circles
    }

    /// Returns the module that defines this path when used in `module`, or the innermost module we
    /// can find. Returns `None` if the path is in another crate.
    fn resolve(&self, module: &[String], names: &[String], steps: usize) -> Option<ModulePath> {
        // There may be a cycle of re-exports, so we need to limit the number of steps.
        let steps = steps.checked_sub(1)?;
        let (first, rest) = names.split_first()?;
        let up = names.iter().take_while(|name| *name == "super").count();
        let (base, rest) = match first.as_str() {
            "crate" => (&[][..], rest),
            "self" => (module, rest),
            "super" => (&module[..module.len().checked_sub(up)?], &names[up..]),
            _ => {
                let contents = &self.modules[module];
                if self.modules.contains_key(&child(module, first)) {
                    (module, names)
                } else {
                    // Check if the first name was imported.
                    let import = contents.imports.get(first)?;
                    let names: Vec<_> = import.iter().chain(rest).cloned().collect();
                    return self.resolve(module, &names, steps);
                }
            }
        };
        self.descend(base.to_vec(), rest, steps)
    }

    fn descend(&self, mut at: ModulePath, names: &[String], steps: usize) -> Option<ModulePath> {
        for (n, name) in names.iter().enumerate() {
            let contents = self.modules.get(&at)?;
            let inner = child(&at, name);
            if self.modules.contains_key(&inner) {
                at = inner;
                continue;
            }
            if contents.items.contains(name) {
                return Some(at);
            }
            let rest = &names[n + 1..];
            if let Some(import) = contents.imports.get(name) {
                let names: Vec<_> = import.iter().chain(rest).cloned().collect();
                return self.resolve(&at, &names, steps);
            }
            let mut globs = contents.globs.iter();
            let by_glob = globs.find_map(|glob| {
                let origin = self.resolve(&at, glob, steps)?;
                let contents = &self.modules[&origin];
                let has = contents.items.contains(name)
                    || contents.imports.contains_key(name)
                    || self.modules.contains_key(&child(&origin, name));
                has.then(|| self.descend(origin, &names[n..], steps))
            });
            return by_glob.unwrap_or(Some(at));
        }
        Some(at)
    }
}

fn child(module: &[String], name: &str) -> ModulePath {
    module.iter().cloned().chain([name.to_owned()]).collect()
}

fn components<T>(arrows: &BTreeMap<(String, String), T>) -> BTreeSet<BTreeSet<String>> {
    let mut reached = BTreeMap::<&str, BTreeSet<&str>>::new();
    for (from, _) in arrows.keys() {
        let mut seen = BTreeSet::new();
        // Find all reachable nodes for each node. Nodes that can reach each other are in a cycle.
        // Because there are just a few dozen nodes, we don't need a faster algorithm.
        let mut open = vec![from.as_str()];
        while let Some(at) = open.pop() {
            let next = arrows.keys().filter(|(from, _)| from == at);
            open.extend(
                next.map(|(_, to)| to.as_str())
                    .filter(|to| seen.insert(*to)),
            );
        }
        reached.insert(from, seen);
    }
    let reaches = |a: &str, b: &str| reached.get(a).is_some_and(|seen| seen.contains(b));
    let circle = |from: &&str| -> BTreeSet<String> {
        let mutual = reached
            .keys()
            .filter(|to| reaches(from, to) && reaches(to, from));
        mutual.map(|name| (*name).to_owned()).collect()
    };
    let circles = reached.keys().map(circle);
    circles.filter(|circle| circle.len() > 1).collect()
}

/// Collects the names and references of all modules in a file.
struct Visitor<'a> {
    modules: &'a mut BTreeMap<ModulePath, Contents>,
    source: &'a Source,
    /// Current module, which can be an inline module.
    module: ModulePath,
}

impl Visitor<'_> {
    fn contents(&mut self) -> &mut Contents {
        self.modules.entry(self.module.clone()).or_default()
    }

    fn define(&mut self, name: &syn::Ident) {
        self.contents().items.insert(name.to_string());
    }

    fn refer(&mut self, line: usize, names: Vec<String>) {
        if self.source.purpose_of(line) == Purpose::Product && names.len() > 1 {
            let path = self.source.path.clone();
            let reference = Reference { path, line, names };
            self.contents().references.push(reference);
        }
    }

    fn import(&mut self, tree: &syn::UseTree, mut names: Vec<String>) {
        let line = tree.span().start().line;
        match tree {
            syn::UseTree::Path(path) => {
                names.push(path.ident.to_string());
                self.import(&path.tree, names);
            }
            syn::UseTree::Name(name) => self.import_as(line, names, &name.ident, &name.ident),
            syn::UseTree::Rename(name) => self.import_as(line, names, &name.ident, &name.rename),
            syn::UseTree::Glob(_) => {
                self.contents().globs.push(names.clone());
                self.refer(line, names);
            }
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(tree, names.clone());
                }
            }
        }
    }

    fn import_as(
        &mut self,
        line: usize,
        mut names: Vec<String>,
        name: &syn::Ident,
        as_name: &syn::Ident,
    ) {
        if name != "self" {
            names.push(name.to_string());
        }
        let as_name = match names.last() {
            Some(last) if as_name == "self" => last.clone(),
            _ => as_name.to_string(),
        };
        self.contents().imports.insert(as_name, names.clone());
        self.refer(line, names);
    }

    fn scan(&mut self, tokens: TokenStream) {
        let mut names = Vec::new();
        let (mut line, mut colons) = (0, 0);
        for token in tokens {
            match &token {
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Ident(ident) => {
                    // A path is joined by two colons, and anything else starts a new path.
                    if colons != 2 || names.is_empty() {
                        self.refer(line, std::mem::take(&mut names));
                        line = ident.span().start().line;
                    }
                    names.push(ident.to_string());
                    colons = 0;
                }
                token => {
                    self.refer(line, std::mem::take(&mut names));
                    colons = 0;
                    if let TokenTree::Group(group) = token {
                        self.scan(group.stream());
                    }
                }
            }
        }
        self.refer(line, names);
    }
}

impl<'ast> Visit<'ast> for Visitor<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        use syn::Item;
        match item {
            Item::Const(item) => self.define(&item.ident),
            Item::Enum(item) => self.define(&item.ident),
            Item::Fn(item) => self.define(&item.sig.ident),
            Item::Static(item) => self.define(&item.ident),
            Item::Struct(item) => self.define(&item.ident),
            Item::Trait(item) => self.define(&item.ident),
            Item::Type(item) => self.define(&item.ident),
            Item::Union(item) => self.define(&item.ident),
            Item::Macro(item) => item.ident.iter().for_each(|ident| self.define(ident)),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.module.push(item.ident.to_string());
        if item.content.is_some() {
            self.contents();
            visit::visit_item_mod(self, item);
        }
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // An inline test module may import anything, but these imports don't belong to the module.
        let is_product = self.source.purpose_of(item.span().start().line) == Purpose::Product;
        if item.leading_colon.is_none() && is_product {
            self.import(&item.tree, Vec::new());
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let names = path.segments.iter().map(|s| s.ident.to_string()).collect();
            self.refer(path.span().start().line, names);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.scan(item.tokens.clone());
        visit::visit_macro(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::tests::tree;

    fn circles_of(name: &str, files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<_> = [("Cargo.toml", "[package]\nname = \"a\"\n")]
            .into_iter()
            .chain(files.iter().copied())
            .collect();
        let packages = tree(name, &files);
        let circles = circles(&packages[0]);
        let shown = circles.iter().map(|circle| {
            let siblings: Vec<_> = circle.siblings.iter().map(String::as_str).collect();
            let (_, parent) = circle.parent.split_once("::").unwrap_or_default();
            format!("{parent}: {}", siblings.join(" "))
        });
        shown.collect()
    }

    #[test]
    fn mutual_sibling_imports_are_cycle() {
        let files = [
            ("src/lib.rs", "mod a; mod b; mod c;"),
            ("src/a.rs", "use crate::b::B;"),
            ("src/b.rs", "pub struct B; fn f() { assert!(super::c::C); }"),
            ("src/c.rs", "pub struct C; fn f() -> crate::a::A {}"),
        ];
        assert_eq!(circles_of("tidy-circle", &files), [": a b c"]);
        assert_eq!(circles_of("tidy-line", &files[..3]), Vec::<String>::new());
    }

    #[test]
    fn names_are_followed_through_re_exports() {
        let files = [
            ("src/lib.rs", "mod a; mod b; pub use a::A; use b::*;"),
            ("src/a.rs", "pub struct A; use super::B;"),
            ("src/b.rs", "pub struct B; use crate::A;"),
        ];
        assert_eq!(circles_of("tidy-re-export", &files), [": a b"]);
    }

    #[test]
    fn parents_and_tests_have_no_edges() {
        let files = [
            ("src/lib.rs", "mod a; pub struct L;"),
            (
                "src/a/mod.rs",
                "mod b; mod c; use b::B; pub struct A; use crate::L;",
            ),
            ("src/a/b.rs", "use super::A; pub struct B; use super::c::C;"),
            (
                "src/a/c.rs",
                "pub struct C;\n#[cfg(test)]\nmod tests { use crate::a::b::B; }",
            ),
        ];
        assert_eq!(circles_of("tidy-parent", &files), Vec::<String>::new());
    }

    #[test]
    fn cycles_belong_to_closing_level() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a/mod.rs", "mod x; mod y;"),
            (
                "src/a/x.rs",
                "use super::y; use crate::b::z::Z; fn f() { y::g(); }",
            ),
            ("src/a/y.rs", "use crate::b; pub fn g() { b::z::h() }"),
            ("src/b/mod.rs", "pub mod z;"),
            (
                "src/b/z.rs",
                "pub struct Z; pub fn h() { crate::a::y::g() }",
            ),
        ];
        assert_eq!(circles_of("tidy-levels", &files), [": a b"]);
    }
}
