"""Complete the site of `mkdocs.yml` with pages that lie elsewhere or come from the code.

README.md and those of ds_configs/ and recipes/ become pages, and so does every file of the
repository that a page links to, so that the strict build checks these links as well.  The log is
no part of the site: links into it lead to the repository.  The pages of flags and of the modules to
copy hold docstrings as they stand: their formulas and columns would not survive Markdown.
Nothing of the project is imported, so a site is built without torch.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"project.md": "README.md", "configurations.md": "ds_configs/README.md",
         "recipes.md": "recipes/README.md"}
MODULES = ("align", "align_dp", "losses", "translation", "spelling", "cross_tokenizer", "tiles",
           "rollout")
SOURCES = "source"
LOG = ("docs/LOG.md", "docs/log/")
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def on_files(files, config):
    """Add the pages that are not in docs/."""
    for page, path in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        text = relocated(text, path, page, config.repo_url)
        files.append(File.generated(config, page, content=text))
    for name in MODULES:
        files.append(File.generated(config, f"api/{name}.md", content=module_page(name)))
    files.append(File.generated(config, "flags.md", content=flags_page()))
    for path in linked_sources(files):
        page = f"{SOURCES}/{path}.md"
        files.append(File.generated(config, page, content=source_page(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links out of docs/ into links to the pages above."""
    uri = page.file.src_uri
    if uri in PAGES or uri.startswith((SOURCES, "api/")):
        return markdown
    return relocated(markdown, f"docs/{uri}", uri, config.repo_url)


def on_page_content(html, page, config, files):
    """Keep flags within a line of text whole; browsers break lines behind hyphens."""
    def replace(match):
        if match[1] is None:
            return match[0]
        return re.sub(r"--\w+", r'<span class="flag">\g<0></span>', match[0])

    return re.sub(r"<pre.*?</pre>|<code>([^<]*)</code>", replace, html, flags=re.DOTALL)


def relocated(text, path, page, repository):
    """Return the text of a file of the repository with the links that its page needs.

    Args:
        path: of the file in the repository; its links are relative to it.
        page: name of the page.
        repository: its address, for links into the log.
    """
    def replace(match):
        before, link, after = match.groups()
        if "://" in link or link.startswith("mailto:"):
            return match.group()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if target.startswith(LOG):
            return f"{before}{repository}/blob/main/{target}{after}"
        target_page = page_of(target)
        return before + posixpath.relpath(target_page, posixpath.dirname(page) or ".") + after

    return LINK.sub(replace, text)


def page_of(path):
    """Return the page on which a file of the repository stands; not every file has one."""
    for page, source in PAGES.items():
        if path == source:
            return page
    if path.removesuffix(".py") in MODULES:
        return f"api/{path.removesuffix('.py')}.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{SOURCES}/{path}.md"


def linked_sources(files):
    """Return the sorted paths of all files of the repository that a page links to."""
    paths = set()
    for file in files.documentation_pages():
        text = file.content_string
        if file.src_uri in PAGES:
            for _, link, _ in LINK.findall(text):
                if link.startswith(f"{SOURCES}/"):
                    paths.add(link.removeprefix(f"{SOURCES}/").removesuffix(".md"))
            continue
        folder = posixpath.join("docs", posixpath.dirname(file.src_uri))
        for _, link, _ in LINK.findall(text):
            target = posixpath.normpath(posixpath.join(folder, link))
            if "://" not in link and page_of(target).startswith(f"{SOURCES}/"):
                paths.add(target)
    return sorted(path for path in paths if (ROOT / path).exists())


def source_page(path):
    """Return a page that shows a file, or lists the files of a folder."""
    full = ROOT / path
    if full.is_dir():
        names = sorted(file.name for file in full.iterdir() if not file.name.startswith("__"))
        listing = "\n".join(f"- `{name}`" for name in names)
        return f"# {path}\n\n{listing}\n"
    language = LANGUAGES.get(full.suffix, "text")
    text = full.read_text(encoding="utf-8")
    return f"# {path}\n\n{fenced(language, text)}\n"


def flags_page():
    """Return a page of all flags of distill.py, from the entries in isogloss/config.py.

    A class whose docstring is no sentence is a group of `--help`.
    """
    tree = ast.parse((ROOT / "isogloss" / "config.py").read_text(encoding="utf-8"))
    lines = ["# Flags", "", "Of `distill.py`; `python distill.py --help` prints the same."]
    for group in tree.body:
        title = ast.get_docstring(group) if isinstance(group, ast.ClassDef) else "."
        if title.endswith("."):
            continue
        lines += ["", f"## {title}", "", "| flag | default | meaning |", "| --- | --- | --- |"]
        for entry in group.body[1:]:
            default, about = entry.value.args[:2]
            meaning = " ".join(about.value.split()).replace("|", "\\|")
            lines.append(f"| `--{entry.target.id}` | `{ast.unparse(default)}` | {meaning} |")
    return "\n".join(lines) + "\n"


def module_page(name):
    """Return a page of a module's docstrings: its own, those of its public classes and functions.
    """
    tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
    parts = [f"# {name}.py", fenced("text", ast.get_docstring(tree))]
    for node in tree.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node)
        if docstring:
            parts += [f"## {node.name}", fenced("python", signature(node)),
                      fenced("text", docstring)]
            parts += method_parts(node)
    return "\n\n".join(parts) + "\n"


def method_parts(node):
    """Return the parts of a page about the public methods of a class."""
    parts = []
    for method in node.body:
        is_public = isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if isinstance(node, ast.ClassDef) and is_public and ast.get_docstring(method):
            parts += [f"### {node.name}.{method.name}", fenced("python", signature(method)),
                      fenced("text", ast.get_docstring(method))]
    return parts


def signature(node):
    """Return how a class or function is declared."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    arguments = ast.unparse(node.args)
    line = f"def {node.name}({arguments})"
    if len(line) <= 100:
        return line
    names = "".join(f"    {argument.strip()},\n" for argument in split_arguments(arguments))
    return f"def {node.name}(\n{names})"


def split_arguments(arguments):
    """Split a list of arguments at its commas, but those inside of brackets."""
    depth = 0
    words = [""]
    for letter in arguments:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return words


def fenced(language, text):
    return f"``````{language}\n{text}\n``````"
