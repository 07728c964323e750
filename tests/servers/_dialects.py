"""What obstore's stores and Hugging Face's clients ask, and how a store answers: requests → `Answer`.

The same files are there in every dialect: `/http/PATH`, `/gcs/BUCKET/OBJECT` (the XML API), `/azure/CONTAINER/BLOB` and
`/hf/OWNER/NAME/…`, with the first folder below the root as the bucket or container and the first two as the repository.
Credentials are counted, not verified; only a repository with a `token` asks for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from tests.servers._answers import Answer, Span, as_json, as_xml, refusal
from tests.servers._controls import Controls
from tests.servers._objects import Meta, Objects, Readable

# What the hub keeps in its large file storage and redirects to a CDN; the rest it sends itself.
_LARGE = (".safetensors", ".h5", ".npz", ".gguf", ".bin", ".msgpack")
SIGNATURE = "SECRET-SIGNATURE"  # in the query of a CDN's URL: no message may show it


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    rest: str  # of the URL's path behind the dialect's name
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Readable
    origin: str  # scheme, host and port as the client named them
    cdn: str  # the origin of the other host name


class Dialects:
    """One method a dialect. Errors of the file system become the dialect's 404."""

    def __init__(self, objects: Objects, controls: Controls) -> None:
        self.objects, self.controls = objects, controls

    def answer(self, dialect: str, request: Request) -> Answer:
        known: dict[str, Callable[[Request], Answer]] = {
            "http": self.http,
            "gcs": self.gcs,
            "azure": self.azure,
            "hf": self.hf,
            "cdn": self.cdn,
        }
        try:
            return known[dialect](request)
        except (KeyError, FileNotFoundError, IsADirectoryError, NotADirectoryError):
            code = "<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message></Error>"
            return as_xml(code, HTTPStatus.NOT_FOUND) if dialect in ("gcs", "azure") else refusal(HTTPStatus.NOT_FOUND)

    # What all dialects do with an object.

    def get(self, request: Request, path: str, headers: Callable[[Meta], list[tuple[str, str]]]) -> Answer:
        self.objects.replace_when_due(path)
        meta, file = self.objects.open(path)
        common = [
            ("Accept-Ranges", "bytes"),
            ("ETag", meta.etag),
            ("Last-Modified", meta.last_modified),
            ("Content-Type", "application/octet-stream"),
            *headers(meta),
        ]
        wanted, unwanted = request.headers.get("If-Match"), request.headers.get("If-None-Match")
        if wanted is not None and wanted not in ("*", meta.etag):
            file.close()
            return Answer(HTTPStatus.PRECONDITION_FAILED, common, b"the object is another")
        if unwanted is not None and unwanted in ("*", meta.etag):
            file.close()
            return Answer(HTTPStatus.NOT_MODIFIED, common)
        if not (span := request.headers.get("Range", request.headers.get("x-ms-range", ""))):
            return Answer(HTTPStatus.OK, common, Span(file, 0, meta.size), path)
        start, stop = _span(span, meta.size)
        if start >= stop:
            file.close()
            unsatisfied = ("Content-Range", f"bytes */{meta.size}")
            return Answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, [*common, unsatisfied])
        common.append(("Content-Range", f"bytes {start}-{stop - 1}/{meta.size}"))
        return Answer(HTTPStatus.PARTIAL_CONTENT, common, Span(file, start, stop), path)

    def put(self, request: Request, path: str) -> Answer:
        meta = self.objects.put(path, request.body)
        return Answer(HTTPStatus.CREATED, [("ETag", meta.etag), ("Last-Modified", meta.last_modified), _goog(meta)])

    def _exists(self, path: str) -> bool:
        try:
            self.objects.meta(path)
        except FileNotFoundError:
            return False
        return True

    # Plain HTTP. Listing is WebDAV's in obstore, which few web servers speak: 405, as from them.

    def http(self, request: Request) -> Answer:
        if request.method in ("GET", "HEAD"):
            return self.get(request, request.rest, lambda _: [])
        return refusal(HTTPStatus.METHOD_NOT_ALLOWED)

    # Google Cloud Storage: https://cloud.google.com/storage/docs/xml-api/reference-methods

    def gcs(self, request: Request) -> Answer:
        bucket, _, name = request.rest.partition("/")
        path, query = f"{bucket}/{name}", request.query
        match request.method:
            case "GET" if not name:
                return self._gcs_list(request, bucket)
            case "GET" | "HEAD":
                return self.get(
                    request, path, lambda meta: [_goog(meta), ("x-goog-stored-content-encoding", "identity")]
                )
            case "POST" if "uploads" in query:
                self.objects.begin(path, upload := uuid.uuid4().hex)
                found = f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(name)}</Key><UploadId>{upload}</UploadId>"
                return as_xml(f"<InitiateMultipartUploadResult>{found}</InitiateMultipartUploadResult>")
            case "PUT" if "uploadId" in query:
                etag = self.objects.part(query["uploadId"], query["partNumber"], request.body)
                return Answer(headers=[("ETag", etag)])
            case "POST" if "uploadId" in query:
                parts = re.findall(r"<PartNumber>(\d+)</PartNumber>", _text(request.body))
                meta = self.objects.complete(query["uploadId"], parts)
                found = f"<Key>{escape(name)}</Key><ETag>{escape(meta.etag)}</ETag>"
                answer = as_xml(f"<CompleteMultipartUploadResult>{found}</CompleteMultipartUploadResult>")
                answer.headers.append(_goog(meta))
                return answer
            case "DELETE" if "uploadId" in query:
                self.objects.abort(query["uploadId"])
                return Answer(HTTPStatus.NO_CONTENT)
            case "DELETE":
                self.objects.delete(path)
                return Answer(HTTPStatus.NO_CONTENT)
            case "PUT":
                there = str(self.objects.meta(path).generation) if self._exists(path) else "0"
                if request.headers.get("x-goog-if-generation-match", there) != there:
                    return refusal(HTTPStatus.PRECONDITION_FAILED)
                answer = self.put(request, path)
                answer.status = HTTPStatus.OK
                return answer
            case _:
                return refusal(HTTPStatus.METHOD_NOT_ALLOWED)

    def _gcs_list(self, request: Request, bucket: str) -> Answer:
        query, top = request.query, f"{bucket}/"
        after = query.get("continuation-token", query.get("start-after", ""))
        most = min(int(query.get("max-keys", 1000)), self.controls.page_size)
        page = self.objects.list(top + query.get("prefix", ""), query.get("delimiter", ""), top + after, most)
        entries = [
            f"<Contents><Key>{escape(meta.path.removeprefix(top))}</Key><Size>{meta.size}</Size>"
            f"<LastModified>{datetime.fromtimestamp(meta.modified, UTC).isoformat()}</LastModified>"
            f"<ETag>{escape(meta.etag)}</ETag></Contents>"
            for meta in page.objects
        ]
        entries += [
            f"<CommonPrefixes><Prefix>{escape(name.removeprefix(top))}</Prefix></CommonPrefixes>"
            for name in page.prefixes
        ]
        if page.next is not None:
            token = escape(page.next.removeprefix(top))
            entries.append(f"<NextContinuationToken>{token}</NextContinuationToken>")
        return as_xml(f"<ListBucketResult>{''.join(entries)}</ListBucketResult>")

    # Azure Blob Storage: https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api

    def azure(self, request: Request) -> Answer:
        container, _, name = request.rest.partition("/")
        path, query, operation = f"{container}/{name}", request.query, request.query.get("comp")
        match request.method:
            case "GET" if operation == "list":
                return self._azure_list(request, container)
            case "GET" | "HEAD":
                return self.get(
                    request, path, lambda _: [("x-ms-blob-type", "BlockBlob"), ("x-ms-version", "2023-11-03")]
                )
            case "POST" if operation == "batch":
                return self._azure_batch(request)
            case "PUT" if operation == "block":
                # Nothing begins or aborts an upload of blocks: uncommitted ones lie there for a week.
                self.objects.begin(path, upload := _uncommitted(path))
                self.objects.part(upload, query["blockid"].replace("/", "_"), request.body)
                return Answer(HTTPStatus.CREATED)
            case "PUT" if operation == "blocklist":
                blocks = re.findall(r"<(?:Uncommitted|Latest)>(.*?)</", _text(request.body))
                meta = self.objects.complete(_uncommitted(path), [block.replace("/", "_") for block in blocks])
                return Answer(HTTPStatus.CREATED, [("ETag", meta.etag), ("Last-Modified", meta.last_modified)])
            case "PUT":
                if request.headers.get("If-None-Match") == "*" and self._exists(path):
                    return refusal(HTTPStatus.CONFLICT)
                there = self.objects.meta(path).etag if self._exists(path) else ""
                if request.headers.get("If-Match", there) != there:
                    return refusal(HTTPStatus.PRECONDITION_FAILED)
                return self.put(request, path)
            case "DELETE":
                self.objects.delete(path)
                return Answer(HTTPStatus.ACCEPTED)
            case _:
                return refusal(HTTPStatus.METHOD_NOT_ALLOWED)

    def _azure_list(self, request: Request, container: str) -> Answer:
        query, top = request.query, f"{container}/"
        most = min(int(query.get("maxresults", 5000)), self.controls.page_size)
        after = top + query.get("marker", "")
        page = self.objects.list(top + query.get("prefix", ""), query.get("delimiter", ""), after, most)
        entries = [
            f"<Blob><Name>{escape(meta.path.removeprefix(top))}</Name><Properties>"
            f"<Last-Modified>{meta.last_modified}</Last-Modified><Etag>{escape(meta.etag)}</Etag>"
            f"<Content-Length>{meta.size}</Content-Length><Content-Type>application/octet-stream</Content-Type>"
            "</Properties></Blob>"
            for meta in page.objects
        ]
        entries += [f"<BlobPrefix><Name>{escape(name.removeprefix(top))}</Name></BlobPrefix>" for name in page.prefixes]
        marker = escape(page.next.removeprefix(top)) if page.next is not None else ""
        found = f"<Blobs>{''.join(entries)}</Blobs><NextMarker>{marker}</NextMarker>"
        return as_xml(f"<EnumerationResults>{found}</EnumerationResults>")

    def _azure_batch(self, request: Request) -> Answer:
        boundary, parts = f"batchresponse_{uuid.uuid4().hex}", list[str]()
        for number, found in enumerate(re.findall(r"^DELETE (\S+) HTTP/1.1\r$", _text(request.body), re.MULTILINE)):
            status = HTTPStatus.ACCEPTED
            try:
                self.objects.delete(unquote(found).partition("azure/")[2] or unquote(found).lstrip("/"))
            except FileNotFoundError:
                status = HTTPStatus.NOT_FOUND
            parts.append(
                f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
                f"HTTP/1.1 {status.value} {status.phrase}\r\nx-ms-version: 2023-11-03\r\n\r\n"
            )
        body = "".join([*parts, f"--{boundary}--\r\n"]).encode()
        return Answer(HTTPStatus.ACCEPTED, [("Content-Type", f"multipart/mixed; boundary={boundary}")], body)

    # Hugging Face: https://huggingface.co/docs/hub/api

    def hf(self, request: Request) -> Answer:
        if match := re.fullmatch(r"api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", request.rest):
            name, action, revision, folder = match.groups()
            if (denied := self._denied(request, name)) is not None:
                return denied
            if (commit := self.commit(name, revision or "main")) is None:
                return _hub_error(HTTPStatus.NOT_FOUND, "RevisionNotFound")
            return self._tree(request, name, commit, folder or "") if action == "tree" else self._model(name, commit)
        if (match := re.fullmatch(r"([^/]+/[^/]+)/resolve/([^/]+)/(.+)", request.rest)) is None:
            return refusal(HTTPStatus.NOT_FOUND)
        name, revision, file = match.groups()
        if (denied := self._denied(request, name)) is not None:
            return denied
        if (commit := self.commit(name, revision)) is None:
            return _hub_error(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        if not self._exists(path := f"{name}/{file}"):
            return _hub_error(HTTPStatus.NOT_FOUND, "EntryNotFound", [("X-Repo-Commit", commit)])
        if not file.endswith(_LARGE):
            return self.get(request, path, lambda _: [("X-Repo-Commit", commit)])
        meta = self.objects.meta(path)
        location = f"{request.cdn}/cdn/{quote(path)}?Expires=4102444800&Signature={SIGNATURE}"
        linked = [("X-Linked-Size", str(meta.size)), ("X-Linked-ETag", f'"{_sha256(meta)}"')]
        return Answer(HTTPStatus.FOUND, [("Location", location), ("X-Repo-Commit", commit), *linked])

    def cdn(self, request: Request) -> Answer:
        """The other host: its ETag is not the hub's, and it wants the signature instead of a token."""
        if "Authorization" in request.headers:
            self.controls.count("cdn_authorization")
        if request.query.get("Signature") != SIGNATURE:
            return refusal(HTTPStatus.FORBIDDEN)
        return self.get(request, request.rest, lambda _: [])

    def commit(self, name: str, revision: str) -> str | None:
        main = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
        known = {"main": main, **self.controls.repositories.get(name, {}).get("revisions", {})}
        return revision if revision in known.values() else known.get(revision)

    def _denied(self, request: Request, name: str) -> Answer | None:
        settings = self.controls.repositories.get(name, {})
        token, given = settings.get("token"), request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not self.objects.file(name).is_dir():
            return _hub_error(HTTPStatus.NOT_FOUND if given else HTTPStatus.UNAUTHORIZED, "RepoNotFound")
        if token is None or given == token:
            return None
        if settings.get("gated"):
            return _hub_error(HTTPStatus.FORBIDDEN if given else HTTPStatus.UNAUTHORIZED, "GatedRepo")
        return _hub_error(HTTPStatus.NOT_FOUND if given else HTTPStatus.UNAUTHORIZED, "RepoNotFound")

    def _model(self, name: str, commit: str) -> Answer:
        page = self.objects.list(f"{name}/", "", "", 1 << 30)
        files = [{"rfilename": meta.path.removeprefix(f"{name}/")} for meta in page.objects]
        settings = self.controls.repositories.get(name, {})
        described = {"id": name, "modelId": name, "sha": commit, "siblings": files, "tags": []}
        closed = {"private": "token" in settings, "gated": "manual" if settings.get("gated") else False}
        return as_json(described | closed)

    def _tree(self, request: Request, name: str, commit: str, folder: str) -> Answer:
        top = f"{name}/"
        recursive = request.query.get("recursive", "").lower() in ("true", "1")
        prefix = top + (f"{folder.rstrip('/')}/" if folder else "")
        after = top + request.query.get("cursor", "")
        most = min(int(request.query.get("limit", 1000)), self.controls.page_size)
        page = self.objects.list(prefix, "" if recursive else "/", after, most)
        entries = [
            {"type": "directory", "oid": commit, "size": 0, "path": path.removeprefix(top).rstrip("/")}
            for path in page.prefixes
        ]
        for meta in page.objects:
            entry: dict[str, Any] = {
                "type": "file",
                "oid": _sha256(meta)[:40],
                "size": meta.size,
                "path": meta.path.removeprefix(top),
            }
            if meta.path.endswith(_LARGE):
                entry["lfs"] = {"oid": _sha256(meta), "size": meta.size, "pointerSize": 134}
            entries.append(entry)
        answer = as_json(entries)
        if page.next is not None:
            cursor = f"cursor={quote(page.next.removeprefix(top), safe='')}&recursive={str(recursive).lower()}"
            url = f"{request.origin}/hf/api/models/{name}/tree/{commit}/{quote(folder)}".rstrip("/")
            answer.headers.append(("Link", f'<{url}?{cursor}>; rel="next"'))
        return answer


def _hub_error(status: int, code: str, headers: list[tuple[str, str]] | None = None) -> Answer:
    return Answer(status, [("X-Error-Code", code), ("X-Error-Message", code), *(headers or [])], b'{"error":"refused"}')


def _goog(meta: Meta) -> tuple[str, str]:
    return ("x-goog-generation", str(meta.generation))


def _sha256(meta: Meta) -> str:
    """Stands for the hash of the bytes, which nobody computes of 20 GB."""
    return hashlib.sha256(meta.etag.encode()).hexdigest()


def _uncommitted(path: str) -> str:
    return "blocks-" + hashlib.sha1(path.encode(), usedforsecurity=False).hexdigest()


def _text(body: Readable) -> str:
    return b"".join(iter(lambda: body.read(1 << 16), b"")).decode()


def _span(text: str, size: int) -> tuple[int, int]:
    first, _, last = text.removeprefix("bytes=").partition("-")
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size
