// What every module draws with. htm's templates make text nodes and properties, never markup from text.
import { h, render, Fragment } from "preact";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);
export const draw = render;
export const Several = Fragment;
export const hooks = { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState };

// The address of a view: everything about it stands in the part after #, so that a link leads back to it.
export function hrefOf(words) {
  const given = Object.entries(words).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return `#${new URLSearchParams(given)}`;
}
